// digest: 24d42c85c6fa
// Rendered by kgen from templates/rmsnorm/forward_unaligned_rows.cu.jinja
// config: unaligned_rows(lanes_per_row=128, groups_per_block=1, vec=8, prefetch=true, load_cache=prefetch_256, store_cache=normal, min_blocks=4)
// problem: N=5003, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward for rows that start at any element (odd N), rows held in registers.
//
//     y[m, n] = x[m, n] * (offset + w[n]) * rsqrt(mean_n(x[m, n]^2) + eps)
//
// Data layout: a group of kLanes threads has a row. Its threads load the aligned vectors that lie
// completely inside the row; the first 2 * kVec threads also load one of the single elements at its ends.
// The offset of a row from an aligned address repeats every kVec rows. A persistent group's rows are a
// multiple of kVec apart, so that a thread has the same columns in all of them and keeps their w in
// registers.
//
// Synchronisation: one block barrier per row, inside GroupSum; none if kLanes <= 32.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/rows/rows.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Residual = kgen::none;
using Rstd = kgen::none;

constexpr int kN = 5003;
constexpr int kLanes = 128;       // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kVec = 8;                   // elements per access
constexpr bool kPrefetch = true;        // load the next row before finishing this one
constexpr int kMinBlocks = 4;      // blocks per SM: sets the grid as well
constexpr kgen::Cache kLoad = kgen::Cache::prefetch_256;
constexpr kgen::Cache kStore = kgen::Cache::normal;

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kThreads = kLanes * kGroups;
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row

static_assert(kVec > 1 && kVec * sizeof(T) <= 16, "one access moves 2 elements to 16 bytes");
static_assert(kN >= kVec, "a row may hold no vector at all");
static_assert(kLanes >= 2 * kVec, "each thread has at most one single element");
static_assert(kThreads >= 32 && kThreads <= 1024, "a block is 32 to 1024 threads");

using Vector = kgen::Vec<T, kVec>;

struct alignas(4) Weight {  // of one vector
    W data[kVec];
};

// The columns of one thread in every row: vectors at first, first + kSweep, ... < vectors_end, and one single
// element at `edge`, or none if edge is kN.
struct Columns {
    int first, vectors_end, edge;
};

KGEN_DEVICE Columns columns_of(int lane, const T* x_row) {
    const auto address = reinterpret_cast<kgen::u64>(x_row);
    const int before = (kVec - static_cast<int>(address / sizeof(T) % kVec)) % kVec;
    const int vectors_end = before + (kN - before) / kVec * kVec;
    Columns own{before + lane * kVec, vectors_end, kN};
    if (lane < before) own.edge = lane;
    if (lane >= kVec && lane < 2 * kVec) own.edge = vectors_end + lane - kVec;
    return own;
}

// Whether this thread's vector of `step` lies in the row. A compile-time constant for steps that end before
// kN - 2 * kVec.
KGEN_DEVICE bool inside(int step, const Columns& own) {
    return (step + 1) * kSweep + 2 * kVec <= kN || step * kSweep + own.first < own.vectors_end;
}

template <class Source>
struct Row {
    kgen::Vec<Source, kVec> vector[kSteps];
    Source edge;
};

template <class Source>
KGEN_DEVICE void load_row(Row<Source>& held, const Source* x_row, bool exists,
                          const Columns& own) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        held.vector[step] = kgen::Vec<Source, kVec>{};
        if (exists && inside(step, own))
            held.vector[step] = kgen::load_vec<kVec, kLoad>(x_row + own.first + step * kSweep);
    }
    held.edge = Source{};
    if (exists && own.edge < kN) held.edge = x_row[own.edge];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rmsnorm_forward(const T* __restrict__ x,             // [M, N], rows x_stride_M apart
                const W* __restrict__ w,             // [N] or null
                const Residual* __restrict__ residual,  // [M, N], its own row stride, or null
                T* __restrict__ y,                   // [M, N]; all rows are aligned alike
                Residual* __restrict__ h,               // [M, N] or null
                Rstd* __restrict__ rstd,            // [M] or null
                kgen::i64 M, kgen::i64 x_stride_M, kgen::i64 residual_stride_M, float eps,
                float offset) {
    using RowSum = kgen::GroupSum<kLanes, kGroups>;
    __shared__ typename RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    const int group = kGroups == 1 ? 0 : static_cast<int>(threadIdx.x / kLanes);
    const int lane = kGroups == 1 ? static_cast<int>(threadIdx.x)
                                  : static_cast<int>(threadIdx.x % kLanes);
    const kgen::i64 stride = static_cast<kgen::i64>(gridDim.x) * kGroups;
    kgen::i64 block_row = static_cast<kgen::i64>(blockIdx.x) * kGroups;
    kgen::i64 row = block_row + group;
    const kgen::u32 zero = static_cast<kgen::u32>(M >> 63);

    // 1. This thread's columns, their w, and the first row.
    const Columns own = columns_of(lane, x + row * x_stride_M);
    Row<T> held;
    load_row(held, x + row * x_stride_M, row < M, own);
    Weight weight[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kVec; ++i)
            weight[step].data[i] =
                kWeighted && inside(step, own) ? w[own.first + step * kSweep + i] : W{};
    }
    const float edge_weight =
        !kWeighted ? 1.0f : own.edge < kN ? offset + kgen::to_float(w[own.edge]) : 0.0f;

    // The condition is uniform over the block: row_sum contains a block barrier.
    for (; block_row < M; block_row += stride, row += stride) {
        // 2. Load the next row.
        const T* next_row = x + (row + stride) * x_stride_M;
        Row<T> next;
        if constexpr (kPrefetch) load_row(next, next_row, row + stride < M, own);

        // 3. Add the residual. The sum is normalised as it is stored in h, rounded.
        if constexpr (kgen::kPresent<Residual>) {
            Row<Residual> addend;
            load_row(addend, residual + row * residual_stride_M, row < M, own);
            Residual* h_row = h + row * kN;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                held.vector[step] = kgen::add(held.vector[step], addend.vector[step]);
                if (row < M && inside(step, own))
                    kgen::store_vec<kStore>(h_row + own.first + step * kSweep,
                                            kgen::as<Residual>(held.vector[step]));
            }
            held.edge = kgen::from_float<T>(kgen::to_float(held.edge) + kgen::to_float(addend.edge));
            if (row < M && own.edge < kN) h_row[own.edge] = held.edge;
        }

        // 4. Mean square.
        const float edge = kgen::to_float(held.edge);
        float sum[4] = {edge * edge};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            float values[kVec];
            kgen::to_floats(held.vector[step], values);
#pragma unroll
            for (int i = 0; i < kVec; ++i) sum[i % 4] = kgen::fma(values[i], values[i], sum[i % 4]);
        }
        const float squares = row_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
        const float scale = kgen::rsqrt(squares * (1.0f / kN) + eps);

        // 5. Scale and write.
        if constexpr (kgen::kPresent<Rstd>) {
            if (lane == 0 && row < M) rstd[row] = scale;
        }
        if (row < M) {
            T* y_row = y + row * kN;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step, own)) continue;
                if constexpr (sizeof(T) == 2) kgen::opaque(held.vector[step], zero);
                if constexpr (sizeof(W) == 2) kgen::opaque(weight[step], zero);
                float values[kVec];
                kgen::to_floats(held.vector[step], values);
#pragma unroll
                for (int i = 0; i < kVec; ++i)
                    values[i] = values[i] * scale *
                                (kWeighted ? offset + kgen::to_float(weight[step].data[i]) : 1.0f);
                kgen::store_vec<kStore>(y_row + own.first + step * kSweep,
                                        kgen::from_floats<T>(values));
            }
            if (own.edge < kN) y_row[own.edge] = kgen::from_float<T>(edge * scale * edge_weight);
        }

        // 6. Next row.
        if constexpr (kPrefetch) {
            held = next;
        } else {
            load_row(held, next_row, row + stride < M, own);
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
