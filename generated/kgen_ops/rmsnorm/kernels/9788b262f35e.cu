// digest: 9788b262f35e
// Rendered by kgen from templates/rmsnorm/backward_bulk_rows.cu.jinja
// config: bulk_rows(threads=256, pieces=1, stages=2, weight=l1, load_policy=evict_last, store_cache=normal, min_blocks=2)
// problem: N=4096, dtype=fp32, w_dtype=fp32, residual_dtype=none, rstd_dtype=none
// RMSNorm backward, persistent blocks fed by the bulk copy engine: pieces of x and dy (and dh) travel
// to a ring in shared memory, which costs no registers and no instructions, so that the copies of the
// next row are on their way while this one is worked on. A row stays in the ring from the sums to dx.
// A thread has the same columns in every row, so that its part of dw grows in registers.
#include "kgen/block.cuh"
#include "kgen/bulk.cuh"
#include "kgen/columns.cuh"
#include "kgen/forget.cuh"
#include "kgen/math.cuh"
#include "kgen/memory.cuh"

namespace {

using T = float;
using W = float;
using Added = kgen::none;
using Saved = kgen::none;

// Where w is from row to row; from `l1` it is read again, twice for every row.
enum class WeightIn { registers, shared, l1 };

constexpr int kN = 4096;
constexpr int kThreads = 256;
constexpr int kPieces = 1;              // of a row
constexpr int kStages = 2;              // pieces in the ring
constexpr WeightIn kWeightIn = WeightIn::l1;
constexpr kgen::BulkCache kLoad = kgen::BulkCache::evict_last;
constexpr kgen::Cache kStore = kgen::Cache::normal;
constexpr int kMinBlocks = 2;       // blocks per SM: sets the grid as well

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr bool kResident = kWeightIn == WeightIn::registers;
constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements per access
constexpr int kPiece = kN / kPieces;                    // columns
constexpr int kPieceVectors = kPiece / kVec;
constexpr int kSteps = (kPieceVectors + kThreads - 1) / kThreads;  // vectors per thread and piece
constexpr int kArrays = kgen::kPresent<Added> ? 3 : 2;             // x, dy, dh
constexpr kgen::u32 kPieceBytes = kPiece * sizeof(T);
constexpr int kWarps = kThreads / kgen::kWarpSize;
constexpr int kSums = kgen::kPresent<Saved> ? 1 : 2;
constexpr int kRowLanes = 16;  // of the second kernel
constexpr int kWeightParts =
    kVec * static_cast<int>(sizeof(W)) > 16 ? kVec * static_cast<int>(sizeof(W)) / 16 : 1;
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kPieces == 0 && kPieceBytes % 16 == 0, "bulk copies move multiples of 16 bytes");
static_assert(kStages > kPieces, "a row is worked on while a piece of the next one arrives");
static_assert(kArrays * kPieceBytes < 1u << 20, "a phase counts up to 2^20 - 1 bytes");
static_assert(kThreads % kgen::kWarpSize == 0 && kThreads <= 1024, "a block is whole warps");

using Vector = kgen::Vec<T, kVec>;

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// Whether step `step` of this thread lies in a piece; known to the compiler but for the last step.
KGEN_DEVICE bool inside(int step) {
    return (step + 1) * kThreads <= kPieceVectors ||
           step * kThreads + static_cast<int>(threadIdx.x) < kPieceVectors;
}

// The thread's first column of a step.
KGEN_DEVICE int column_of(int piece, int step) {
    return piece * kPiece + (step * kThreads + static_cast<int>(threadIdx.x)) * kVec;
}

KGEN_DEVICE Weight load_weight(const W* w, int piece, int step) {
    Weight weight{};
    if (kWeighted && inside(step)) {
#pragma unroll
        for (int part = 0; part < kWeightParts; ++part)
            weight.part[part] =
                kgen::load_vec<kWeightVec>(w + column_of(piece, step) + part * kWeightVec);
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
    Vector vectors[kArrays][kPieceVectors];
};

struct Ring {
    kgen::Mbarrier full[kStages];
    kgen::Mbarrier empty[kStages];
};

struct Rows {  // of the whole call
    const T* x;
    const T* dy;
    const Added* dh;
    kgen::i64 M, x_stride, dy_stride, dh_stride;
};

// Start the copies of piece `number` of this block (pieces of its rows in order), if it exists. By
// one thread.
KGEN_DEVICE void start_piece(Stage* stages, Ring& ring, const Rows& rows, kgen::i64 number) {
    const kgen::i64 row = blockIdx.x + number / kPieces * gridDim.x;
    if (row >= rows.M) return;
    const int stage = static_cast<int>(number % kStages);
    const int column = static_cast<int>(number % kPieces) * kPiece;
    kgen::Mbarrier& full = ring.full[stage];
    Vector(&target)[kArrays][kPieceVectors] = stages[stage].vectors;
    kgen::mbarrier_arrive_expect(full, kArrays * kPieceBytes);
    kgen::bulk_load<kLoad>(target[0], rows.x + row * rows.x_stride + column, kPieceBytes, full);
    kgen::bulk_load<kLoad>(target[1], rows.dy + row * rows.dy_stride + column, kPieceBytes, full);
    if constexpr (kgen::kPresent<Added>)
        kgen::bulk_load<kLoad>(target[kArrays - 1], rows.dh + row * rows.dh_stride + column,
                               kPieceBytes, full);
}

}  // namespace

// Why nobody waits for ever. Pieces 0, 1, ... of a block sit in stage number % kStages, so phase
// number / kStages of full[stage] is the piece's. The elected thread arms that phase (its only
// arrival, and all of its bytes) exactly when the piece exists: at the start, or in phase 4 of the
// piece after the one that gives up its stage. There it first waits for empty[stage], at which every
// warp arrives once it has done with that older piece: all warps are past the same block barrier and
// wait for nothing on the way there but pieces that the elected thread has itself seen arrive.
extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
rmsnorm_backward(const T* __restrict__ dy,        // [M, N], rows dy_stride_M apart
                 const T* __restrict__ x,         // [M, N], rows x_stride_M apart
                 const W* __restrict__ w,         // [N] or null
                 const Saved* __restrict__ rstd,  // [M] or null
                 const Added* __restrict__ dh,    // [M, N], rows dh_stride_M apart, or null
                 T* __restrict__ dx,              // [M, N]
                 float* __restrict__ partial,     // [blocks, N]; unused without w
                 kgen::i64 M, kgen::i64 dy_stride_M, kgen::i64 x_stride_M, kgen::i64 dh_stride_M,
                 float eps, float offset) {
    using RowSums = kgen::GroupSum<kThreads, 1, kSums>;
    __shared__ typename RowSums::Scratch scratch;
    __shared__ Ring ring;
    RowSums row_sums(scratch);

    // Shared memory: Stage stages[kStages]; W shared_w[kN], if w is kept there. Neighbouring threads
    // read neighbouring vectors.
    Stage* stages = kgen::dynamic_smem<Stage>();
    W* shared_w = reinterpret_cast<W*>(stages + kStages);
    const W* w_source = kWeightIn == WeightIn::shared ? shared_w : w;
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
        for (int number = 0; number < kStages; ++number) start_piece(stages, ring, rows, number);
    }
    Weight weight[kPieces][kSteps];
    if constexpr (kWeightIn == WeightIn::shared) {  // a thread reads what it wrote itself
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                const Weight copied = load_weight(w, piece, step);
                if (inside(step))
                    *reinterpret_cast<Weight*>(shared_w + column_of(piece, step)) = copied;
            }
        }
    }
    if constexpr (kResident) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece)
#pragma unroll
            for (int step = 0; step < kSteps; ++step)
                weight[piece][step] = load_weight(w, piece, step);
    }
    float sum_dw[kPieces][kSteps][kVec] = {};
    kgen::sync_block();

    // stage and parity of the row's first piece; number of that piece
    int first_stage = 0;
    kgen::u32 first_parity = 0;
    kgen::i64 first_number = 0;
    for (kgen::i64 row = blockIdx.x; row < M; row += gridDim.x) {
        // 2. Sums of g * x, and of x * x unless rstd is known.
        float gx[2] = {};
        float squares[2] = {};
        float saved = 0.0f;
        if constexpr (kgen::kPresent<Saved>) saved = rstd[row];
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const bool wraps = first_stage + piece >= kStages;
            const int stage = first_stage + piece - (wraps ? kStages : 0);
            kgen::mbarrier_wait(ring.full[stage], first_parity ^ (wraps ? 1u : 0u));
            const Stage& held = stages[stage];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step)) continue;
                const Weight factors =
                    kResident ? weight[piece][step] : load_weight(w_source, piece, step);
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
        sums[kSums - 1] = squares[0] + squares[1];
        sums[0] = gx[0] + gx[1];
        if (kSums == 2) sums[kSums - 1] = squares[0] + squares[1];
        row_sums(sums);
        const float scale = kSums == 1 ? saved : kgen::rsqrt(sums[kSums - 1] * (1.0f / kN) + eps);
        const float mean = sums[0] * scale * (1.0f / kN);  // of g * xhat

        // 3. dx = rstd * (g - xhat * mean) + dh, and dy * xhat towards dw. The address of a weight
        // that is read again depends on the sum, or it would be kept from phase 2 on.
        const W* w_again = w_source + (kgen::bit_cast<kgen::u32>(scale) & zero);
        T* dx_row = dx + row * kN;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const int stage = first_stage + piece - (first_stage + piece >= kStages ? kStages : 0);
            const Stage& held = stages[stage];
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step)) continue;
                if constexpr (!kResident) weight[piece][step] = load_weight(w_again, piece, step);
                if constexpr (sizeof(W) == 2) kgen::forget(weight[piece][step], zero);
                float values[kVec], gradients[kVec], g[kVec], added[kVec];
                kgen::to_floats(held.vectors[0][step * kThreads + thread], values);
                kgen::to_floats(held.vectors[1][step * kThreads + thread], gradients);
                kgen::to_floats(held.vectors[kArrays - 1][step * kThreads + thread], added);
                weighted(g, gradients, weight[piece][step], offset);
#pragma unroll
                for (int i = 0; i < kVec; ++i) {
                    const float xhat = values[i] * scale;
                    if (kWeighted)
                        sum_dw[piece][step][i] =
                            kgen::fma(gradients[i], xhat, sum_dw[piece][step][i]);
                    values[i] = scale * kgen::fma(-xhat, mean, g[i]);
                    if (kgen::kPresent<Added>) values[i] += added[i];
                }
                kgen::store_vec<kStore>(dx_row + column_of(piece, step),
                                        kgen::from_floats<T>(values));
            }

            // 4. This warp has done with the piece. The one before it, with which the others have
            // probably done as well, makes room for one kStages further on.
            kgen::sync_warp();
            if (thread % kgen::kWarpSize == 0) kgen::mbarrier_arrive(ring.empty[stage]);
            const kgen::i64 older = first_number + piece - 1;
            if (elected && older >= 0) {
                const int room = stage == 0 ? kStages - 1 : stage - 1;
                kgen::mbarrier_wait(ring.empty[room],
                                    static_cast<kgen::u32>(older / kStages % 2));
                start_piece(stages, ring, rows, older + kStages);
            }
            kgen::sync_warp();
        }

        // 5. Move on.
        first_number += kPieces;
        first_stage += kPieces;
        if (first_stage >= kStages) {
            first_stage -= kStages;
            first_parity ^= 1;
        }
    }

    // 6. The block's sums of dw.
    if constexpr (kWeighted) {
        float* target = partial + static_cast<kgen::i64>(blockIdx.x) * kN;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                if (!inside(step)) continue;
#pragma unroll
                for (int part = 0; part < kVec / 4; ++part) {
                    kgen::Vec<float, 4> four;
#pragma unroll
                    for (int i = 0; i < 4; ++i) four[i] = sum_dw[piece][step][part * 4 + i];
                    kgen::store_vec(target + column_of(piece, step) + part * 4, four);
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
