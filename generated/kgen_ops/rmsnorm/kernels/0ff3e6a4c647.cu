// digest: 0ff3e6a4c647
// Rendered by kgen from templates/rmsnorm/backward_rows_in_registers.cu.jinja
// config: rows_in_registers(lanes_per_row=256, groups_per_block=1, vec=8, resident_weight=true, prefetch=false, load_cache=normal, store_cache=normal, min_blocks=2)
// problem: N=5003, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm backward, rows held in registers, persistent blocks.
//
//     g = dy * (offset + w)    xhat = x * rstd
//     dx = rstd * (g - xhat * mean_n(g * xhat)) + dh    dw = sum_m(dy * xhat)
//
// A group of kLanes threads reads x and dy of a row once, reduces two sums and writes dx. A thread has the
// same columns in every row, so that its part of dw accumulates in registers. Each block writes one row of
// partial sums of dw; a second kernel adds those rows in a fixed order.
//
// Data layout of rows that start at any element (odd N, kUnaligned): threads load the aligned vectors
// that lie completely inside the row; the first 2 * kVec threads also load one of the single elements at
// its ends. The offset of a row from an aligned address repeats every kVec rows, and a group's rows are a
// multiple of kVec apart.
//
// Synchronisation: one block barrier per row, inside GroupSum; none if kLanes <= 32.
#include "kgen/primitives/block.cuh"
#include "kgen/rows/columns.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Residual = kgen::none;
using Rstd = kgen::none;

constexpr int kN = 5003;
constexpr int kLanes = 256;       // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kVec = 8;                   // elements per access
constexpr bool kResident = true;  // w in registers, or read from L1 for every row
constexpr bool kPrefetch = false;        // load the next row before finishing this one
constexpr kgen::Cache kLoad = kgen::Cache::normal;
constexpr kgen::Cache kStore = kgen::Cache::normal;
constexpr int kMinBlocks = 2;      // blocks per SM: sets the grid as well

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr bool kUnaligned = kN % kVec != 0;
constexpr int kThreads = kLanes * kGroups;
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row
constexpr int kSums = kgen::kPresent<Rstd> ? 1 : 2;
constexpr int kRowLanes = 16;                       // of the second kernel
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(!kUnaligned || (kN >= kVec && kLanes >= 2 * kVec),
              "each of the first 2 * kVec threads has at most one single element");
static_assert(kThreads >= 32 && kThreads <= 1024, "a block is 32 to 1024 threads");

using Vector = kgen::Vec<T, kVec>;

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// The columns of one thread in every row: vectors at first, first + kSweep, ... < vectors_end, and one single
// element at `edge`, or none if edge is kN.
struct Columns {
    int first, vectors_end, edge;
};

KGEN_DEVICE Columns columns_of(int lane, const T* x_row) {
    if constexpr (!kUnaligned) {
        return Columns{lane * kVec, kN, kN};
    } else {
        const auto address = reinterpret_cast<kgen::u64>(x_row);
        const int before = (kVec - static_cast<int>(address / sizeof(T) % kVec)) % kVec;
        const int vectors_end = before + (kN - before) / kVec * kVec;
        Columns own{before + lane * kVec, vectors_end, kN};
        if (lane < before) own.edge = lane;
        if (lane >= kVec && lane < 2 * kVec) own.edge = vectors_end + lane - kVec;
        return own;
    }
}

// Whether this thread's vector of `step` lies in the row. A compile-time constant for all but the last steps.
KGEN_DEVICE bool inside(int step, const Columns& own) {
    return (step + 1) * kSweep + (kUnaligned ? 2 * kVec : 0) <= kN ||
           step * kSweep + own.first < own.vectors_end;
}

// One thread's part of a row.
struct Row {
    Vector x[kSteps], dy[kSteps];
    kgen::Vec<Residual, kVec> dh[kSteps];
    T x_edge, dy_edge;
    Residual dh_edge;
    float rstd;
};

struct Rows {  // the tensors of the call
    const T* x;
    const T* dy;
    const Residual* dh;
    const Rstd* rstd;
    kgen::i64 M, x_stride, dy_stride, dh_stride;
};

KGEN_DEVICE void load_row(Row& held, const Rows& rows, kgen::i64 row, const Columns& own) {
    const bool exists = row < rows.M;
    const T* x = rows.x + row * rows.x_stride;
    const T* dy = rows.dy + row * rows.dy_stride;
    const Residual* dh = rows.dh + row * rows.dh_stride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int column = own.first + step * kSweep;
        held.x[step] = Vector{};
        held.dy[step] = Vector{};
        if (exists && inside(step, own)) {
            held.x[step] = kgen::load_vec<kVec, kLoad>(x + column);
            held.dy[step] = kgen::load_vec<kVec, kLoad>(dy + column);
            if constexpr (kgen::kPresent<Residual>)
                held.dh[step] = kgen::load_vec<kVec, kLoad>(dh + column);
        }
    }
    held.x_edge = T{};
    held.dy_edge = T{};
    if (kUnaligned && exists && own.edge < kN) {
        held.x_edge = x[own.edge];
        held.dy_edge = dy[own.edge];
        if constexpr (kgen::kPresent<Residual>) held.dh_edge = dh[own.edge];
    }
    held.rstd = 0.0f;
    if constexpr (kgen::kPresent<Rstd>) {
        if (exists) held.rstd = rows.rstd[row];
    }
}

KGEN_DEVICE Weight load_weight(const W* w, int step, const Columns& own) {
    Weight weight{};
    if (kWeighted && inside(step, own)) {
        const W* source = w + own.first + step * kSweep;
#pragma unroll
        for (int part = 0; part < kWeightParts; ++part) {
            if constexpr (kUnaligned) {  // w is aligned differently from the row
#pragma unroll
                for (int i = 0; i < kWeightVec; ++i)
                    weight.part[part][i] = source[part * kWeightVec + i];
            } else {
                weight.part[part] = kgen::load_vec<kWeightVec>(source + part * kWeightVec);
            }
        }
    }
    return weight;
}

// g = dy * (offset + w), or dy without a weight.
KGEN_DEVICE void weighted(float (&g)[kVec], const float (&dy)[kVec], const Weight& weight,
                          float offset) {
#pragma unroll
    for (int part = 0; part < kWeightParts; ++part) {
        float factors[kWeightVec];
        kgen::to_floats(weight.part[part], factors);
#pragma unroll
        for (int i = 0; i < kWeightVec; ++i) {
            const int at = part * kWeightVec + i;
            g[at] = kWeighted ? dy[at] * (offset + factors[i]) : dy[at];
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rmsnorm_backward(const T* __restrict__ dy,        // [M, N], rows dy_stride_M apart
                 const T* __restrict__ x,         // [M, N], rows x_stride_M apart
                 const W* __restrict__ w,         // [N] or null
                 const Rstd* __restrict__ rstd,  // [M] or null
                 const Residual* __restrict__ dh,    // [M, N], rows dh_stride_M apart, or null
                 T* __restrict__ dx,              // [M, N]
                 float* __restrict__ partial,     // [blocks, N]; unused without w
                 kgen::i64 M, kgen::i64 dy_stride_M, kgen::i64 x_stride_M, kgen::i64 dh_stride_M,
                 float eps, float offset) {
    using RowSums = kgen::GroupSum<kLanes, kGroups, kSums>;
    __shared__ typename RowSums::Scratch scratch;
    RowSums row_sums(scratch);

    const int group = kGroups == 1 ? 0 : static_cast<int>(threadIdx.x / kLanes);
    const int lane = kGroups == 1 ? static_cast<int>(threadIdx.x)
                                  : static_cast<int>(threadIdx.x % kLanes);
    const kgen::i64 stride = static_cast<kgen::i64>(gridDim.x) * kGroups;
    kgen::i64 block_row = static_cast<kgen::i64>(blockIdx.x) * kGroups;
    kgen::i64 row = block_row + group;
    const kgen::u32 zero = static_cast<kgen::u32>(M >> 63);
    const Rows rows{x, dy, dh, rstd, M, x_stride_M, dy_stride_M, dh_stride_M};

    // 1. This thread's columns, their w, and the first row.
    const Columns own = columns_of(lane, x + row * x_stride_M);
    Row held;
    load_row(held, rows, row, own);
    Weight weight[kSteps];
    if constexpr (kResident) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) weight[step] = load_weight(w, step, own);
    }
    float edge_weight = 1.0f;
    if constexpr (kWeighted && kUnaligned) {
        if (own.edge < kN) edge_weight = offset + kgen::to_float(w[own.edge]);
    }
    float sum_dw[kSteps][kVec] = {};
    float edge_dw = 0.0f;

    // The condition is uniform over the block: row_sums contains a block barrier.
    for (; block_row < M; block_row += stride, row += stride) {
        // 2. Load the next row.
        Row next;
        if constexpr (kPrefetch) load_row(next, rows, row + stride, own);

        // 3. Sums of g * x, and of x * x unless rstd is given.
        float sums[kSums] = {};
        float gx[2] = {};
        float squares[2] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const Weight factors = kResident ? weight[step] : load_weight(w, step, own);
            float values[kVec], gradients[kVec], g[kVec];
            kgen::to_floats(held.x[step], values);
            kgen::to_floats(held.dy[step], gradients);
            weighted(g, gradients, factors, offset);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                gx[i % 2] = kgen::fma(g[i], values[i], gx[i % 2]);
                if (kSums == 2) squares[i % 2] = kgen::fma(values[i], values[i], squares[i % 2]);
            }
        }
        const float x_edge = kgen::to_float(held.x_edge);
        const float dy_edge = kgen::to_float(held.dy_edge);
        sums[0] = kgen::fma(dy_edge * edge_weight, x_edge, gx[0] + gx[1]);
        sums[kSums - 1] += kSums == 2 ? kgen::fma(x_edge, x_edge, squares[0] + squares[1]) : 0.0f;
        row_sums(sums);
        const float scale =
            kSums == 1 ? held.rstd : kgen::rsqrt(sums[kSums - 1] * (1.0f / kN) + eps);
        const float mean = sums[0] * scale * (1.0f / kN);  // of g * xhat

        // 4. dx = rstd * (g - xhat * mean) + dh, and dy * xhat added to dw. The address of w
        // depends on the sum, so that the compiler does not keep w in registers from phase 3 on.
        const W* w_again = w + (kgen::bit_cast<kgen::u32>(scale) & zero);
        if (row < M) {
            T* dx_row = dx + row * kN;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step, own)) continue;
                if constexpr (sizeof(T) == 2) kgen::opaque(held.x[step], zero);
                if constexpr (sizeof(T) == 2) kgen::opaque(held.dy[step], zero);
                if constexpr (!kResident) weight[step] = load_weight(w_again, step, own);
                if constexpr (sizeof(W) == 2) kgen::opaque(weight[step], zero);
                float values[kVec], gradients[kVec], g[kVec], added[kVec];
                kgen::to_floats(held.x[step], values);
                kgen::to_floats(held.dy[step], gradients);
                kgen::to_floats(held.dh[step], added);
                weighted(g, gradients, weight[step], offset);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    const float xhat = values[i] * scale;
                    if (kWeighted)
                        sum_dw[step][i] = kgen::fma(gradients[i], xhat, sum_dw[step][i]);
                    values[i] = scale * kgen::fma(-xhat, mean, g[i]);
                    if (kgen::kPresent<Residual>) values[i] += added[i];
                }
                kgen::store_vec<kStore>(dx_row + own.first + step * kSweep,
                                        kgen::from_floats<T>(values));
            }
            if (kUnaligned && own.edge < kN) {
                const float xhat = x_edge * scale;
                edge_dw = kgen::fma(dy_edge, xhat, edge_dw);
                float result = scale * kgen::fma(-xhat, mean, dy_edge * edge_weight);
                if constexpr (kgen::kPresent<Residual>) result += kgen::to_float(held.dh_edge);
                dx_row[own.edge] = kgen::from_float<T>(result);
            }
        }

        // 5. Next row.
        if constexpr (kPrefetch) {
            held = next;
        } else {
            load_row(held, rows, row + stride, own);
        }
    }

    // 6. The block's sums of dw. The groups add their sums one after the other, in a fixed order.
    if constexpr (kWeighted && kGroups == 1) {
        float* target = partial + static_cast<kgen::i64>(blockIdx.x) * kN;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (!inside(step, own)) continue;
#pragma unroll
            for (int i = 0; i < kVec; ++i) target[own.first + step * kSweep + i] = sum_dw[step][i];
        }
        if (kUnaligned && own.edge < kN) target[own.edge] = edge_dw;
    } else if constexpr (kWeighted) {
        __shared__ float total[kGroups > 1 ? kN : 1];
        for (int turn = 0; turn < kGroups; ++turn) {
            if (turn == group) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    if (!inside(step, own)) continue;
#pragma unroll
                    for (int i = 0; i < kVec; ++i) {
                        float& sum = total[own.first + step * kSweep + i];
                        sum = turn == 0 ? sum_dw[step][i] : sum + sum_dw[step][i];
                    }
                }
                if (kUnaligned && own.edge < kN)
                    total[own.edge] = turn == 0 ? edge_dw : total[own.edge] + edge_dw;
            }
            kgen::sync_block();
        }
        for (int n = static_cast<int>(threadIdx.x); n < kN; n += kThreads)
            partial[static_cast<kgen::i64>(blockIdx.x) * kN + n] = total[n];
    }
}

KGEN_EXPORT(rmsnorm_backward);

extern "C" __global__ void __launch_bounds__(32 * kRowLanes)
rmsnorm_backward_weight(const float* __restrict__ partial,  // [blocks, N]
                        W* __restrict__ dw,                 // [N]
                        kgen::i64 blocks) {
    const float sum = kgen::column_sum<kRowLanes>(partial, blocks, kN);
    const int n = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x);
    if (threadIdx.x < 32 && n < kN) dw[n] = kgen::from_float<W>(sum);
}

KGEN_EXPORT(rmsnorm_backward_weight);
