// digest: 34454b323417
// Rendered by kgen from templates/rmsnorm/backward_bulk_rows.cu.jinja
// config: bulk_rows(threads=512, copies_per_row=2, stages=8, weight_memory=registers, load_policy=normal, store_cache=streaming, min_blocks=1)
// problem: N=8192, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=fp32
// RMSNorm backward, persistent blocks, rows staged in shared memory by bulk copies (cp.async.bulk, sm_90).
//
//     g = dy * (offset + w)    xhat = x * rstd
//     dx = rstd * (g - xhat * mean_n(g * xhat)) + dh    dw = sum_m(dy * xhat)
//
// A row is copied in kChunks chunks; a chunk is a run of columns of x, dy and, if there is one, dh. Chunks
// of the following rows are in flight while the block works on a row. A row stays in shared memory for both
// phases that read it. A thread has the same columns in every row, so that its part of dw accumulates in
// registers. Each block writes one row of partial sums of dw; a second kernel adds those rows in order.
//
// Shared memory: Stage stages[kStages], a ring of chunks; W shared_w[kN], if w is kept there.
//
// Synchronisation. Chunk number i (counted over the rows of a block) is in stage i % kStages and belongs to
// phase i / kStages of that stage's mbarriers.
//   full[stage]   completes when the bytes of the chunk have arrived. Thread 0 arrives, with the byte count.
//   empty[stage]  completes when every warp has arrived, after its last read of the chunk.
// After its work on chunk i, thread 0 waits for empty[stage] of chunk i - 1 and then loads chunk
// i - 1 + kStages into that stage. The wait always ends: all warps have passed the block barrier of the
// reduction before, and until they arrive at empty[stage] they wait only for chunks that thread 0 has
// already waited for.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/bulk_copy.cuh"
#include "kgen/rows/columns.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Residual = kgen::none;
using Rstd = float;

// Where w is kept between rows. With `global`, w is read twice for every row, through L1.
enum class WeightMemory { registers, shared, global };

constexpr int kN = 8192;
constexpr int kThreads = 512;
constexpr int kChunks = 2;              // bulk copies of each tensor per row
constexpr int kStages = 8;              // chunks in the ring
constexpr WeightMemory kWeightMemory = WeightMemory::registers;
constexpr kgen::BulkCache kLoad = kgen::BulkCache::normal;
constexpr kgen::Cache kStore = kgen::Cache::streaming;
constexpr int kMinBlocks = 1;       // blocks per SM: sets the grid as well

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr bool kResident = kWeightMemory == WeightMemory::registers;
constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements per access
constexpr int kChunk = kN / kChunks;                    // columns
constexpr int kChunkVectors = kChunk / kVec;
constexpr int kSteps = (kChunkVectors + kThreads - 1) / kThreads;  // vectors per thread and chunk
constexpr int kArrays = kgen::kPresent<Residual> ? 3 : 2;             // x, dy, dh
constexpr kgen::u32 kChunkBytes = kChunk * sizeof(T);
constexpr int kWarps = kThreads / kgen::kWarpSize;
constexpr int kSums = kgen::kPresent<Rstd> ? 1 : 2;
constexpr int kRowLanes = 16;  // of the second kernel
constexpr int kWeightParts =
    kVec * static_cast<int>(sizeof(W)) > 16 ? kVec * static_cast<int>(sizeof(W)) / 16 : 1;
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kChunks == 0 && kChunkBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
static_assert(kStages > kChunks, "the ring holds a whole row and a chunk of the next one");
static_assert(kArrays * kChunkBytes < 1u << 20, "a phase counts up to 2^20 - 1 bytes");
static_assert(kThreads % kgen::kWarpSize == 0 && kThreads <= 1024, "a block is whole warps");

using Vector = kgen::Vec<T, kVec>;

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// Whether this thread's vector of `step` lies in the chunk. A compile-time constant for all but the last step.
KGEN_DEVICE bool inside(int step) {
    return (step + 1) * kThreads <= kChunkVectors ||
           step * kThreads + static_cast<int>(threadIdx.x) < kChunkVectors;
}

// The first column of this thread's vector of `step`.
KGEN_DEVICE int column_of(int chunk, int step) {
    return chunk * kChunk + (step * kThreads + static_cast<int>(threadIdx.x)) * kVec;
}

KGEN_DEVICE Weight load_weight(const W* w, int chunk, int step) {
    Weight weight{};
    if (kWeighted && inside(step)) {
#pragma unroll
        for (int part = 0; part < kWeightParts; ++part)
            weight.part[part] =
                kgen::load_vec<kWeightVec>(w + column_of(chunk, step) + part * kWeightVec);
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

struct Stage {
    Vector vectors[kArrays][kChunkVectors];
};

struct Ring {
    kgen::Mbarrier full[kStages];
    kgen::Mbarrier empty[kStages];
};

struct Rows {  // the tensors of the call
    const T* x;
    const T* dy;
    const Residual* dh;
    kgen::i64 M, x_stride, dy_stride, dh_stride;
};

// Starts the copies of chunk `number` of this block, if it exists. Called by one thread.
KGEN_DEVICE void load_chunk(Stage* stages, Ring& ring, const Rows& rows, kgen::i64 number) {
    const kgen::i64 row = blockIdx.x + number / kChunks * gridDim.x;
    if (row >= rows.M) return;
    const int stage = static_cast<int>(number % kStages);
    const int column = static_cast<int>(number % kChunks) * kChunk;
    kgen::Mbarrier& full = ring.full[stage];
    Vector(&target)[kArrays][kChunkVectors] = stages[stage].vectors;
    kgen::mbarrier_arrive_expect_tx(full, kArrays * kChunkBytes);
    kgen::bulk_load<kLoad>(target[0], rows.x + row * rows.x_stride + column, kChunkBytes, full);
    kgen::bulk_load<kLoad>(target[1], rows.dy + row * rows.dy_stride + column, kChunkBytes, full);
    if constexpr (kgen::kPresent<Residual>)
        kgen::bulk_load<kLoad>(target[kArrays - 1], rows.dh + row * rows.dh_stride + column,
                               kChunkBytes, full);
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
    using RowSums = kgen::GroupSum<kThreads, 1, kSums>;
    __shared__ typename RowSums::Scratch scratch;
    __shared__ Ring ring;
    RowSums row_sums(scratch);

    Stage* stages = kgen::dynamic_smem<Stage>();
    W* shared_w = reinterpret_cast<W*>(stages + kStages);
    const W* w_source = kWeightMemory == WeightMemory::shared ? shared_w : w;
    const int thread = static_cast<int>(threadIdx.x);
    const bool elected = thread == 0;
    const kgen::u32 zero = static_cast<kgen::u32>(M >> 63);
    const Rows rows{x, dy, dh, M, x_stride_M, dy_stride_M, dh_stride_M};

    // 1. Fill the ring.
    if (elected) {
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            kgen::mbarrier_init(ring.full[stage], 1);
            kgen::mbarrier_init(ring.empty[stage], kWarps);
        }
        kgen::mbarrier_init_fence();
        for (int number = 0; number < kStages; ++number) load_chunk(stages, ring, rows, number);
    }
    Weight weight[kChunks][kSteps];
    if constexpr (kWeightMemory == WeightMemory::shared) {  // a thread reads what it wrote
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const Weight copied = load_weight(w, chunk, step);
                if (inside(step))
                    *reinterpret_cast<Weight*>(shared_w + column_of(chunk, step)) = copied;
            }
        }
    }
    if constexpr (kResident) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                weight[chunk][step] = load_weight(w, chunk, step);
    }
    float sum_dw[kChunks][kSteps][kVec] = {};
    kgen::sync_block();

    // Stage, mbarrier parity and number of the row's first chunk.
    int first_stage = 0;
    kgen::u32 first_parity = 0;
    kgen::i64 first_number = 0;
    for (kgen::i64 row = blockIdx.x; row < M; row += gridDim.x) {
        // 2. Sums of g * x, and of x * x unless rstd is given.
        float gx[2] = {};
        float squares[2] = {};
        float saved = 0.0f;
        if constexpr (kgen::kPresent<Rstd>) saved = rstd[row];
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const bool wraps = first_stage + chunk >= kStages;
            const int stage = first_stage + chunk - (wraps ? kStages : 0);
            kgen::mbarrier_wait(ring.full[stage], first_parity ^ (wraps ? 1u : 0u));
            const Stage& held = stages[stage];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step)) continue;
                const Weight factors =
                    kResident ? weight[chunk][step] : load_weight(w_source, chunk, step);
                float values[kVec], gradients[kVec], g[kVec];
                kgen::to_floats(held.vectors[0][step * kThreads + thread], values);
                kgen::to_floats(held.vectors[1][step * kThreads + thread], gradients);
                weighted(g, gradients, factors, offset);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    gx[i % 2] = kgen::fma(g[i], values[i], gx[i % 2]);
                    if (kSums == 2) squares[i % 2] = kgen::fma(values[i], values[i], squares[i % 2]);
                }
            }
        }
        float sums[kSums];
        sums[0] = gx[0] + gx[1];
        if (kSums == 2) sums[kSums - 1] = squares[0] + squares[1];
        row_sums(sums);
        const float scale = kSums == 1 ? saved : kgen::rsqrt(sums[kSums - 1] * (1.0f / kN) + eps);
        const float mean = sums[0] * scale * (1.0f / kN);  // of g * xhat

        // 3. dx = rstd * (g - xhat * mean) + dh, and dy * xhat added to dw. The address of w depends
        // on the sum, so that the compiler does not keep w in registers from phase 2 on.
        const W* w_again = w_source + (kgen::bit_cast<kgen::u32>(scale) & zero);
        T* dx_row = dx + row * kN;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int stage = first_stage + chunk - (first_stage + chunk >= kStages ? kStages : 0);
            const Stage& held = stages[stage];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step)) continue;
                if constexpr (!kResident) weight[chunk][step] = load_weight(w_again, chunk, step);
                if constexpr (sizeof(W) == 2) kgen::opaque(weight[chunk][step], zero);
                float values[kVec], gradients[kVec], g[kVec], added[kVec];
                kgen::to_floats(held.vectors[0][step * kThreads + thread], values);
                kgen::to_floats(held.vectors[1][step * kThreads + thread], gradients);
                kgen::to_floats(held.vectors[kArrays - 1][step * kThreads + thread], added);
                weighted(g, gradients, weight[chunk][step], offset);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    const float xhat = values[i] * scale;
                    if (kWeighted)
                        sum_dw[chunk][step][i] =
                            kgen::fma(gradients[i], xhat, sum_dw[chunk][step][i]);
                    values[i] = scale * kgen::fma(-xhat, mean, g[i]);
                    if (kgen::kPresent<Residual>) values[i] += added[i];
                }
                kgen::store_vec<kStore>(dx_row + column_of(chunk, step),
                                        kgen::from_floats<T>(values));
            }

            // 4. Release the chunk. Thread 0 then refills the stage of the previous chunk, which the
            // other warps have probably released, too.
            kgen::sync_warp();
            if (thread % kgen::kWarpSize == 0) kgen::mbarrier_arrive(ring.empty[stage]);
            const kgen::i64 previous = first_number + chunk - 1;
            if (elected && previous >= 0) {
                const int freed = stage == 0 ? kStages - 1 : stage - 1;
                kgen::mbarrier_wait(ring.empty[freed],
                                    static_cast<kgen::u32>(previous / kStages % 2));
                load_chunk(stages, ring, rows, previous + kStages);
            }
            kgen::sync_warp();
        }

        // 5. Next row.
        first_number += kChunks;
        first_stage += kChunks;
        if (first_stage >= kStages) {
            first_stage -= kStages;
            first_parity ^= 1;
        }
    }

    // 6. The block's sums of dw.
    if constexpr (kWeighted) {
        float* target = partial + static_cast<kgen::i64>(blockIdx.x) * kN;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step)) continue;
#pragma unroll
                for (int part = 0; part < kVec / 4; ++part) {
                    kgen::Vec<float, 4> four;
#pragma unroll
                    for (int i = 0; i < 4; ++i) four[i] = sum_dw[chunk][step][part * 4 + i];
                    kgen::store_vec(target + column_of(chunk, step) + part * 4, four);
                }
            }
        }
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
