// digest: 21cbb922f750
// Rendered by kgen from templates/rmsnorm/forward_rows_in_registers.cu.jinja
// config: rows_in_registers(lanes_per_row=512, groups_per_block=1, rows_per_group=1, vec=8, weight=early, persistent=false, prefetch=false, load_cache=no_l1, store_cache=evict_first, min_blocks=1)
// problem: N=8192, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, rows held in registers: a group of threads reads `kRows` rows, all loads first,
// and writes them scaled. Each row is read once, and `kRows` rows cost one barrier (none up to 32
// threads per row). Persistent blocks walk over the rows: they can keep the weight, and ask for the
// next rows before they finish the present ones.
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

// When w is read: with x, after the sum is known, or once per persistent block.
enum class WeightLoad { early, late, resident };

constexpr int kN = 8192;
constexpr int kLanes = 512;         // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kRows = 1;         // rows that a group holds at once
constexpr int kVec = 8;                     // elements per access
constexpr bool kPersistent = false;
constexpr bool kPrefetch = false;
constexpr WeightLoad kWeightLoad = WeightLoad::early;
constexpr kgen::Cache kLoad = kgen::Cache::no_l1;
constexpr kgen::Cache kStore = kgen::Cache::evict_first;
constexpr int kMinBlocks = 1;        // blocks per SM that registers leave room for

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kThreads = kLanes * kGroups;
constexpr int kRowsPerBlock = kGroups * kRows;
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kVec == 0, "a vector would reach into the next row");
static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(kThreads >= 32 && kThreads <= 1024, "a block is 32 to 1024 threads");
static_assert(kPersistent || (!kPrefetch && kWeightLoad != WeightLoad::resident),
              "only a persistent block has a next row and keeps the weight");

using Vector = kgen::Vec<T, kVec>;

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// Whether step `step` of this thread lies in the row; known to the compiler but for the last step.
KGEN_DEVICE bool inside(int step, int first) {
    return (step + 1) * kSweep <= kN || step * kSweep + first < kN;
}

// Rows row0, row0 + kGroups, ...: what a warp loads at once stays consecutive.
template <class Source>
KGEN_DEVICE void load_rows(kgen::Vec<Source, kVec> (&held)[kRows][kSteps], const Source* x,
                           kgen::i64 row0, kgen::i64 M, kgen::i64 x_stride_M, int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const Source* source = x + (row0 + r * kGroups) * x_stride_M + first;
        const bool exists = row0 + r * kGroups < M;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            held[r][step] = kgen::Vec<Source, kVec>{};
            if (exists && inside(step, first))
                held[r][step] = kgen::load_vec<kVec, kLoad>(source + step * kSweep);
        }
    }
}

KGEN_DEVICE Weight load_weight(const W* w, int step, int first) {
    Weight weight{};
    if (kWeighted && inside(step, first)) {
#pragma unroll
        for (int part = 0; part < kWeightParts; ++part)
            weight.part[part] =
                kgen::load_vec<kWeightVec>(w + step * kSweep + first + part * kWeightVec);
    }
    return weight;
}

// Four chains, so that the additions of a long row do not wait for each other.
KGEN_DEVICE float sum_of_squares(const Vector (&held)[kSteps]) {
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float values[kVec];
        kgen::to_floats(held[step], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            float& chain = sum[(step * kVec + i) % 4];
            chain = kgen::fma(values[i], values[i], chain);
        }
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

KGEN_DEVICE Vector scaled(const Vector& held, const Weight& weight, float scale, float offset) {
    float values[kVec];
    kgen::to_floats(held, values);
#pragma unroll
    for (int part = 0; part < kWeightParts; ++part) {
        float factors[kWeightVec];
        kgen::to_floats(weight.part[part], factors);
#pragma unroll
        for (int i = 0; i < kWeightVec; ++i) {
            float& value = values[part * kWeightVec + i];
            value = value * scale * (kWeighted ? offset + factors[i] : 1.0f);
        }
    }
    return kgen::from_floats<T>(values);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rmsnorm_forward(const T* __restrict__ x,             // [M, N], rows x_stride_M apart
                const W* __restrict__ w,             // [N] or null
                const Added* __restrict__ residual,  // [M, N], rows residual_stride_M apart, or null
                T* __restrict__ y,                   // [M, N]
                Added* __restrict__ h,               // [M, N] or null
                Saved* __restrict__ rstd,            // [M] or null
                kgen::i64 M, kgen::i64 x_stride_M, kgen::i64 residual_stride_M, float eps,
                float offset) {
    using RowSums = kgen::GroupSum<kLanes, kGroups, kRows>;
    __shared__ typename RowSums::Scratch scratch;
    RowSums row_sums(scratch);

    const int group = kGroups == 1 ? 0 : static_cast<int>(threadIdx.x / kLanes);
    const int lane = kGroups == 1 ? static_cast<int>(threadIdx.x)
                                  : static_cast<int>(threadIdx.x % kLanes);
    const int first = lane * kVec;  // this thread's column in step 0
    const kgen::i64 stride = static_cast<kgen::i64>(gridDim.x) * kRowsPerBlock;
    const kgen::u32 zero = static_cast<kgen::u32>(M >> 63);

    Weight weight[kSteps];
    Vector held[kRows][kSteps];
    kgen::i64 block_row = static_cast<kgen::i64>(blockIdx.x) * kRowsPerBlock;
    if constexpr (kWeightLoad == WeightLoad::resident) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) weight[step] = load_weight(w, step, first);
    }
    if constexpr (kPrefetch) load_rows(held, x, block_row + group, M, x_stride_M, first);

    // The condition is the same for the whole block, which meets in row_sums.
    for (; block_row < M; block_row += stride) {
        // 1. Issue every load before the first use.
        Vector next[kRows][kSteps];
        if constexpr (kPrefetch) {
            load_rows(next, x, block_row + stride + group, M, x_stride_M, first);
        } else {
            load_rows(held, x, block_row + group, M, x_stride_M, first);
        }
        kgen::Vec<Added, kVec> added[kRows][kSteps];
        if constexpr (kgen::kPresent<Added>)
            load_rows(added, residual, block_row + group, M, residual_stride_M, first);
        if constexpr (kWeighted && kWeightLoad == WeightLoad::early) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) weight[step] = load_weight(w, step, first);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) kgen::forget(weight[step], zero);
        }

        // 2. What is normalised is x + residual, rounded as it is stored.
        const kgen::i64 row0 = block_row + group;
        if constexpr (kgen::kPresent<Added>) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    if (row0 + r * kGroups >= M || !inside(step, first)) continue;
                    held[r][step] = kgen::add(held[r][step], added[r][step]);
                    kgen::store_vec<kStore>(h + (row0 + r * kGroups) * kN + first + step * kSweep,
                                            kgen::as<Added>(held[r][step]));
                }
            }
        }

        // 3. Mean squares of all rows, behind one barrier.
        float scale[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) scale[r] = sum_of_squares(held[r]);
        row_sums(scale);
#pragma unroll
        for (int r = 0; r < kRows; ++r) scale[r] = kgen::rsqrt(scale[r] * (1.0f / kN) + eps);

        if constexpr (kgen::kPresent<Saved>) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                if (lane == 0 && row0 + r * kGroups < M) rstd[row0 + r * kGroups] = scale[r];
        }

        // 4. Scale and write. The address of a late weight depends on the sum, or on a result two
        // steps before: that keeps its loads down here, and few at a time, which saves registers.
        kgen::u32 earlier[2] = {kgen::bit_cast<kgen::u32>(scale[0]) & zero,
                                kgen::bit_cast<kgen::u32>(scale[0]) & zero};
        T* target = y + row0 * kN + first;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if constexpr (kWeighted && kWeightLoad == WeightLoad::late)
                weight[step] = load_weight(w + earlier[step % 2], step, first);
            if constexpr (sizeof(W) == 2 && kPersistent) kgen::forget(weight[step], zero);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (row0 + r * kGroups >= M || !inside(step, first)) continue;
                if constexpr (sizeof(T) == 2) kgen::forget(held[r][step], zero);
                const Vector result = scaled(held[r][step], weight[step], scale[r], offset);
                kgen::store_vec<kStore>(target + (r * kGroups * kN + step * kSweep), result);
                earlier[step % 2] = kgen::bit_cast<kgen::u32>(kgen::to_float(result[0])) & zero;
            }
        }

        // 5. Move on.
        if constexpr (!kPersistent) break;
        if constexpr (kPrefetch) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
#pragma unroll
                for (int step = 0; step < kSteps; ++step) held[r][step] = next[r][step];
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
