// digest: 4cf1913699eb
// Rendered by kgen from templates/rmsnorm/forward_rows_in_registers.cu.jinja
// config: rows_in_registers(lanes_per_row=256, groups_per_block=1, rows_per_group=1, vec=8, weight_load=before_reduction, persistent=false, prefetch=false, load_cache=no_l1, store_cache=evict_first, min_blocks=1)
// problem: N=2048, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, rows held in registers.
//
//     y[m, n] = x[m, n] * (offset + w[n]) * rsqrt(mean_n(x[m, n]^2) + eps)
//
// A group of kLanes threads reads kRows rows into registers, reduces their squares and writes them
// scaled, so that each row is read from memory once. A persistent block loops over the rows: it can keep
// w in registers and load the next rows before it finishes the current ones.
//
// Synchronisation: one block barrier per kRows rows, inside GroupSum; none if kLanes <= 32.
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

// When w is loaded: with x before the reduction, after it, or once per persistent block.
enum class WeightLoad { before_reduction, after_reduction, resident };

constexpr int kN = 2048;
constexpr int kLanes = 256;         // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kRows = 1;         // rows that a group holds at once
constexpr int kVec = 8;                     // elements per access
constexpr bool kPersistent = false;
constexpr bool kPrefetch = false;
constexpr WeightLoad kWeightLoad = WeightLoad::before_reduction;
constexpr kgen::Cache kLoad = kgen::Cache::no_l1;
constexpr kgen::Cache kStore = kgen::Cache::evict_first;
constexpr int kMinBlocks = 1;        // blocks per SM that registers leave room for

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kThreads = kLanes * kGroups;
constexpr int kRowsPerBlock = kGroups * kRows;
// One block per row. The block's row always exists, and no test for that delays the first load.
constexpr bool kOneRow = kRowsPerBlock == 1 && !kPersistent;
// Groups of the last block whose row does not exist compute the last row once more, and store nothing. If their loads
// had a condition, the compiler would move the loads of w behind the reduction, to the stores, which have the same one.
constexpr bool kRepeatLast = !kOneRow && !kPersistent;
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row
// So few values per thread that their fp32 copies may stay in registers from the reduction to the stores.
constexpr bool kShort = kRepeatLast && kRows * kSteps <= 2;
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

// Whether this thread's vector of `step` lies in the row. A compile-time constant for all but the last step.
KGEN_DEVICE bool inside(int step, int first) {
    return (step + 1) * kSweep <= kN || step * kSweep + first < kN;
}

KGEN_DEVICE bool exists(kgen::i64 row, kgen::i64 M) { return kOneRow || row < M; }

// Loads rows row0, row0 + kGroups, ...: the rows that a warp loads in one access are consecutive.
template <class Source>
KGEN_DEVICE void load_rows(kgen::Vec<Source, kVec> (&held)[kRows][kSteps], const Source* x,
                           kgen::i64 row0, kgen::i64 M, kgen::i64 x_stride_M, int first) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const kgen::i64 row = kRepeatLast ? kgen::min(row0 + r * kGroups, M - 1) : row0 + r * kGroups;
        const Source* source = x + row * x_stride_M + first;
        const bool is_row = kRepeatLast || exists(row, M);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            held[r][step] = kgen::Vec<Source, kVec>{};
            if (is_row && inside(step, first))
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

// Four accumulators, so that the additions of a long row do not depend on each other.
KGEN_DEVICE float sum_of_squares(const Vector (&held)[kSteps]) {
    float sum[4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        float values[kVec];
        kgen::to_floats(held[step], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
            float& partial = sum[(step * kVec + i) % 4];
            partial = kgen::fma(values[i], values[i], partial);
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
                const Residual* __restrict__ residual,  // [M, N], its own row stride, or null
                T* __restrict__ y,                   // [M, N]
                Residual* __restrict__ h,               // [M, N] or null
                Rstd* __restrict__ rstd,            // [M] or null
                kgen::i64 M, kgen::i64 x_stride_M, kgen::i64 residual_stride_M, float eps,
                float offset) {
    using RowSums = kgen::GroupReduce<kgen::Sum, kLanes, kGroups, kRows, kgen::Partials::read>;
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

    // The condition is uniform over the block: row_sums contains a block barrier.
    for (; !kPersistent || block_row < M; block_row += stride) {
        // 1. Issue every load before the first use.
        Vector next[kRows][kSteps];
        if constexpr (kPrefetch) {
            load_rows(next, x, block_row + stride + group, M, x_stride_M, first);
        } else {
            load_rows(held, x, block_row + group, M, x_stride_M, first);
        }
        kgen::Vec<Residual, kVec> residuals[kRows][kSteps];
        if constexpr (kgen::kPresent<Residual>)
            load_rows(residuals, residual, block_row + group, M, residual_stride_M, first);
        if constexpr (kWeighted && kWeightLoad == WeightLoad::before_reduction) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) weight[step] = load_weight(w, step, first);
#pragma unroll
            for (int step = 0; step < kSteps; ++step) kgen::opaque(weight[step], zero);
        }

        // 2. Add the residual. The sum is normalised as it is stored in h, rounded.
        const kgen::i64 row0 = block_row + group;
        if constexpr (kgen::kPresent<Residual>) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    if (!exists(row0 + r * kGroups, M) || !inside(step, first)) continue;
                    held[r][step] = kgen::add(held[r][step], residuals[r][step]);
                    kgen::store_vec<kStore>(h + (row0 + r * kGroups) * kN + first + step * kSweep,
                                            kgen::as<Residual>(held[r][step]));
                }
            }
        }

        // 3. Mean squares of all rows, with one barrier.
        float scale[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) scale[r] = sum_of_squares(held[r]);
        row_sums(scale);
#pragma unroll
        for (int r = 0; r < kRows; ++r) scale[r] = kgen::rsqrt(scale[r] * (1.0f / kN) + eps);

        if constexpr (kgen::kPresent<Rstd>) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                if (lane == 0 && exists(row0 + r * kGroups, M)) rstd[row0 + r * kGroups] = scale[r];
        }

        // 4. Scale and write. With after_reduction the address of w depends on the sum, or on the result of
        // two steps before. The compiler then cannot hoist these loads, and few registers hold w at a time.
        kgen::u32 dependent_zero[2] = {kgen::bit_cast<kgen::u32>(scale[0]) & zero,
                                       kgen::bit_cast<kgen::u32>(scale[0]) & zero};
        T* target = y + row0 * kN + first;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if constexpr (kWeighted && kWeightLoad == WeightLoad::after_reduction)
                weight[step] = load_weight(w + dependent_zero[step % 2], step, first);
            if constexpr (sizeof(W) == 2 && kPersistent) kgen::opaque(weight[step], zero);
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (!kRepeatLast && (!exists(row0 + r * kGroups, M) || !inside(step, first))) continue;
                if constexpr (sizeof(T) == 2 && !kShort) kgen::opaque(held[r][step], zero);
                Vector& result = held[r][step] = scaled(held[r][step], weight[step], scale[r], offset);
                if constexpr (kRepeatLast) {
                    kgen::opaque(result, zero);
                } else {
                    kgen::store_vec<kStore>(target + (r * kGroups * kN + step * kSweep), result);
                }
                dependent_zero[step % 2] =
                    kgen::bit_cast<kgen::u32>(kgen::to_float(result[0])) & zero;
            }
        }
        if constexpr (kRepeatLast) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                if (!exists(row0 + r * kGroups, M)) continue;
#pragma unroll
                for (int step = 0; step < kSteps; ++step)
                    if (inside(step, first))
                        kgen::store_vec<kStore>(target + (r * kGroups * kN + step * kSweep), held[r][step]);
            }
        }

        // 5. Next rows.
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
