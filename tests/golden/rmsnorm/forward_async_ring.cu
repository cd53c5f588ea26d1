// Rendered by kgen from templates/rmsnorm/forward_async_ring.cu.jinja
// config: async_ring(lanes_per_row=64, groups_per_block=1, vec=8, stages=2, resident_weight=false, min_blocks=4, store_cache=normal)
// problem: N=4096, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, persistent blocks fed by asynchronous copies: each group of threads keeps a ring
// of rows on the way to shared memory, so that the bytes in flight cost no registers and a row's
// loads were issued `kStages - 1` rows before its turn.
#include "kgen/async.cuh"
#include "kgen/block.cuh"
#include "kgen/math.cuh"
#include "kgen/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;

constexpr int kN = 4096;
constexpr int kLanes = 64;          // threads that share a row: a group
constexpr int kGroups = 1;
constexpr int kVec = 8;                      // elements per access
constexpr int kStages = 2;                // rows of a group in shared memory
constexpr bool kResidentWeight = false;  // w stays in registers
constexpr int kMinBlocks = 4;         // blocks per SM: sets the grid as well
constexpr kgen::Cache kStore = kgen::Cache::normal;

constexpr int kThreads = kLanes * kGroups;
constexpr int kSweep = kLanes * kVec;               // elements a group moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread and row
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kVec == 0, "a vector would reach into the next row");
static_assert(kVec * sizeof(T) == 16, "cp.async goes past L1 with 16 bytes only");
static_assert(kThreads >= 32 && kThreads <= 1024, "a block is 32 to 1024 threads");
static_assert(kStages >= 2, "a ring of one stage overlaps nothing");

using Vector = kgen::Vec<T, kVec>;

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// Whether step `step` of this thread lies in the row; known to the compiler but for the last step.
KGEN_DEVICE bool inside(int step, int first) {
    return (step + 1) * kSweep <= kN || step * kSweep + first < kN;
}

KGEN_DEVICE Weight load_weight(const W* w, int column) {
    Weight weight;
#pragma unroll
    for (int part = 0; part < kWeightParts; ++part)
        weight.part[part] = kgen::load_vec<kWeightVec>(w + column + part * kWeightVec);
    return weight;
}

// Start the copies of a row, if it exists, into `slot`: this thread's vectors of one stage. The
// group is closed even when empty, so that counting groups counts rows.
KGEN_DEVICE void start_row(Vector* slot, const T* x, kgen::i64 row, kgen::i64 M,
                           kgen::i64 x_stride_M, int first) {
    if (row < M) {
        const T* source = x + row * x_stride_M + first;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (inside(step, first))
                kgen::cp_async<sizeof(Vector)>(slot + step * kThreads, source + step * kSweep);
        }
    }
    kgen::cp_async_commit();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rmsnorm_forward(const T* __restrict__ x,  // [M, N], rows x_stride_M apart
                const W* __restrict__ w,  // [N]
                T* __restrict__ y,        // [M, N]
                kgen::i64 M, kgen::i64 x_stride_M, float eps, float offset) {
    using RowSum = kgen::GroupSum<kLanes, kGroups>;
    __shared__ typename RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    // Shared memory: Vector ring[kStages][kSteps][kThreads]. A thread copies only what it will read
    // itself, so that waiting for its own copies is enough and no barrier guards the ring.
    Vector* ring = kgen::dynamic_smem<Vector>() + threadIdx.x;
    constexpr int kStageVectors = kSteps * kThreads;

    const int group = kGroups == 1 ? 0 : static_cast<int>(threadIdx.x / kLanes);
    const int lane = kGroups == 1 ? static_cast<int>(threadIdx.x)
                                  : static_cast<int>(threadIdx.x % kLanes);
    const int first = lane * kVec;  // this thread's column in step 0
    const kgen::i64 stride = static_cast<kgen::i64>(gridDim.x) * kGroups;
    kgen::i64 block_row = static_cast<kgen::i64>(blockIdx.x) * kGroups;

    // 1. Fill the ring but for one stage.
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage)
        start_row(ring + stage * kStageVectors, x, block_row + stage * stride + group, M,
                  x_stride_M, first);

    Weight weight[kSteps];
    if constexpr (kResidentWeight) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            weight[step] = inside(step, first) ? load_weight(w, step * kSweep + first) : Weight{};
    }

    // The condition is the same for the whole block, which meets in row_sum.
    int stage = 0;
    for (; block_row < M; block_row += stride) {
        // 2. Refill the stage that the previous row left, then wait for the present row.
        const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
        start_row(ring + free_stage * kStageVectors, x,
                  block_row + (kStages - 1) * stride + group, M, x_stride_M, first);
        kgen::cp_async_wait<kStages - 1>();

        // 3. Mean square.
        const Vector* held = ring + stage * kStageVectors;
        const bool exists = block_row + group < M;
        float sum[4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (!exists || !inside(step, first)) continue;
            float values[kVec];
            kgen::to_floats(held[step * kThreads], values);
#pragma unroll
            for (int i = 0; i < kVec; ++i) sum[i % 4] = kgen::fma(values[i], values[i], sum[i % 4]);
        }
        const float squares = row_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
        const float scale = kgen::rsqrt(squares * (1.0f / kN) + eps);

        // 4. Scale and write; the row is read from shared memory a second time.
        T* target = y + (block_row + group) * kN + first;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (!exists || !inside(step, first)) continue;
            if constexpr (!kResidentWeight) weight[step] = load_weight(w, step * kSweep + first);
            float values[kVec];
            kgen::to_floats(held[step * kThreads], values);
#pragma unroll
            for (int part = 0; part < kWeightParts; ++part) {
                float factors[kWeightVec];
                kgen::to_floats(weight[step].part[part], factors);
#pragma unroll
                for (int i = 0; i < kWeightVec; ++i) {
                    float& value = values[part * kWeightVec + i];
                    value = value * scale * (offset + factors[i]);
                }
            }
            kgen::store_vec<kStore>(target + step * kSweep, kgen::from_floats<T>(values));
        }
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    // The copies still on the way belong to rows that do not exist: there are none.
}

KGEN_EXPORT(rmsnorm_forward);
