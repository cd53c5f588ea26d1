// digest: d3d977f44586
// Rendered by kgen from templates/rmsnorm/forward_ragged_rows.cu.jinja
// config: ragged_rows(lanes_per_row=128, groups_per_block=1, vec=8, prefetch=false, load_cache=normal, store_cache=streaming, min_blocks=5)
// problem: N=5003, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward for rows that start at any element: persistent blocks move the aligned vectors
// that lie whole inside a row, and a few threads one element more each: what is left at the ends.
//
// Where a row starts, counted from an aligned address, repeats every kVec rows. The rows of a group
// lie a multiple of kVec apart, so that each thread's columns are the same in all of them, and its
// part of the weight stays in registers.
#include "kgen/block.cuh"
#include "kgen/forget.cuh"
#include "kgen/math.cuh"
#include "kgen/memory.cuh"
#include "kgen/rows.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Added = kgen::none;
using Saved = kgen::none;

constexpr int kN = 5003;
constexpr int kLanes = 128;       // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kVec = 8;                   // elements per access
constexpr bool kPrefetch = false;        // ask for the next row before finishing this one
constexpr int kMinBlocks = 5;      // blocks per SM: sets the grid as well
constexpr kgen::Cache kLoad = kgen::Cache::normal;
constexpr kgen::Cache kStore = kgen::Cache::streaming;

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kThreads = kLanes * kGroups;
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row

static_assert(kVec > 1 && kVec * sizeof(T) <= 16, "one access moves 2 elements to 16 bytes");
static_assert(kN >= kVec, "a row may hold no vector at all");
static_assert(kLanes >= 2 * kVec, "the ends are shared out one element per thread");
static_assert(kThreads >= 32 && kThreads <= 1024, "a block is 32 to 1024 threads");

using Vector = kgen::Vec<T, kVec>;

struct alignas(4) Weight {  // of one vector
    W data[kVec];
};

// The columns of one thread in every row: vectors at first, first + kSweep, ... < vectors_end, and
// one element at `edge`, or none.
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

// Steps that end before kN - 2 * kVec are inside wherever the row starts.
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
                const Added* __restrict__ residual,  // [M, N], rows residual_stride_M apart, or null
                T* __restrict__ y,                   // [M, N]; all rows are aligned alike
                Added* __restrict__ h,               // [M, N] or null
                Saved* __restrict__ rstd,            // [M] or null
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

    // 1. The columns of this thread, their weight, and the first row.
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

    // The condition is the same for the whole block, which meets in row_sum.
    for (; block_row < M; block_row += stride, row += stride) {
        // 2. Ask for the next row.
        const T* next_row = x + (row + stride) * x_stride_M;
        Row<T> next;
        if constexpr (kPrefetch) load_row(next, next_row, row + stride < M, own);

        // 3. What is normalised is x + residual, rounded as it is stored.
        if constexpr (kgen::kPresent<Added>) {
            Row<Added> added;
            load_row(added, residual + row * residual_stride_M, row < M, own);
            Added* h_row = h + row * kN;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                held.vector[step] = kgen::add(held.vector[step], added.vector[step]);
                if (row < M && inside(step, own))
                    kgen::store_vec<kStore>(h_row + own.first + step * kSweep,
                                            kgen::as<Added>(held.vector[step]));
            }
            held.edge = kgen::from_float<T>(kgen::to_float(held.edge) + kgen::to_float(added.edge));
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
        if constexpr (kgen::kPresent<Saved>) {
            if (lane == 0 && row < M) rstd[row] = scale;
        }
        if (row < M) {
            T* y_row = y + row * kN;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step, own)) continue;
                if constexpr (sizeof(T) == 2) kgen::forget(held.vector[step], zero);
                if constexpr (sizeof(W) == 2) kgen::forget(weight[step], zero);
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

        // 6. Move on.
        if constexpr (kPrefetch) {
            held = next;
        } else {
            load_row(held, next_row, row + stride < M, own);
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
