// The norm's part of a gradient of linear attention, for the loop of chunk_loop.cuh.
//
// The norm is the output of one more value feature, whose v is 1. The loops of gq and gk have value features as keys,
// so there it is one more key, with numbers x_t and y_t beside a_t and b_t; a step also has a weight and a factor:
//
//     S_t = S_{t-1} + w_t b_t v_t^T     z_t = z_{t-1} + w_t y_t v_t     out_t = f_t (a_t S_t + x_t z_t)
//
//                 x              y              w               f
//     gq          -gout . out    1              1               scale / norm
//     gk          1              -gout . out    scale / norm    1
//     gv          no such key                   scale / norm    1
//
// x, y, z, w and f are fp32 for every dtype. A score is a_t b_s + x_t y_s, added before it is rounded: the two terms
// may nearly cancel. Within a chunk f (x z) is added to the outputs, and z is summed from the rows v in shared memory.
//
// Weighted values: w_t v_t is an operand of the update and of the outputs. fp32 is multiplied before it is split;
// bf16 is rounded to bf16. fp16 becomes TF32, because w_t v_t may be too small for fp16. Exact: 16 bits become two
// TF32 terms, for a final state that is returned in fp32.
//
// Shared memory: float fields[Stages][kFields][Chunk]; float sums[2][BlockV], z before a chunk of either parity.
//
// Synchronisation: start() belongs to the cp.async group of the chunk's rows. The threads that copied a chunk's numbers
// call finish() after the wait and before the block barrier. add_chunk() of chunk c and apply() of chunk c lie between
// the same two barriers.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/math.cuh"

namespace kgen {

// Operands of the update whose a_columns() multiplies each step's values by its weight.
template <class Operands>
struct WeightedOperands;

template <bool Split>
struct WeightedOperands<Tf32Operands<Split>> : Tf32Operands<Split> {
    using A = typename Tf32Operands<Split>::A;

    static KGEN_DEVICE A a_columns(const float* tile, int stride, const float* weights) {
        const MmaLane lane = mma_lane();
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int step = lane.q + i / 2 * 4;
            Tf32Operands<Split>::put(
                a, i, tile[step * stride + lane.g + i % 2 * 8] * weights[step]);
        }
        return a;
    }
};

// The weights of a lane's pairs of steps in a fragment of 16-bit values: pair i has steps 2q + 8 (i / 2) and the next.
KGEN_DEVICE f32x2 pair_weights(const float* weights, int pair) {
    const Vec<float, 2> two =
        *reinterpret_cast<const Vec<float, 2>*>(weights + 2 * mma_lane().q + pair / 2 * 8);
    return f32x2{two[0], two[1]};
}

template <>
struct WeightedOperands<HalfOperands<bf16>> : HalfOperands<bf16> {
    static KGEN_DEVICE A a_columns(const bf16* tile, int stride, const float* weights) {
        A a = HalfOperands<bf16>::a_columns<false>(tile, stride, 1.0f);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 by = pair_weights(weights, i), two = unpack2<bf16>(a.pair[i]);
            a.pair[i] = pack2<bf16>(two.x * by.x, two.y * by.y);
        }
        return a;
    }
};

// 16 steps as two TF32 products of 8: k = q, q + 4 of the first are steps 2q, 2q + 1, of the second those 8 later.
// B is exact; A has one term, or with Exact two.
template <class T, bool Exact>
struct WeightedTf32Operands {
    static constexpr int kStep = 16, kPasses = Exact ? 2 : 1;
    static constexpr bool kChained = Exact;

    using Term = Tf32Operands<Exact>;
    struct A {
        typename Term::A half[2];
    };
    struct B {
        Tf32Operands<false>::B half[2];
    };

    static KGEN_DEVICE A a_columns(const T* tile, int stride, const float* weights) {
        const auto pairs = HalfOperands<T>::template a_columns<false>(tile, stride, 1.0f);
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 by = pair_weights(weights, i), two = unpack2<T>(pairs.pair[i]);
            Term::put(a.half[i / 2], i % 2, two.x * by.x);
            Term::put(a.half[i / 2], i % 2 + 2, two.y * by.y);
        }
        return a;
    }

    static KGEN_DEVICE B b_columns(const T* tile, int stride) {
        const auto pairs = HalfOperands<T>::b_columns(tile, stride);
        B b;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const f32x2 two = unpack2<T>(pairs.pair[i]);
            b.half[i].hi[0] = bit_cast<u32>(two.x);
            b.half[i].hi[1] = bit_cast<u32>(two.y);
        }
        return b;
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (Exact && Pass == 0) {
                mma_tf32_m16n8k8(sums, a.half[i].lo, b.half[i].hi);
            } else {
                mma_tf32_m16n8k8(sums, a.half[i].hi, b.half[i].hi);
            }
        }
    }
};

// P V of these values: scores and values as TF32.
template <class Values>
struct WeightedScoreOperands : ScoreOperands<fp16> {
    static KGEN_DEVICE A of_values(const Values& values, int step) {
        A a = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) a.hi[i] = values.half[step].hi[i];
        return a;
    }
};

// Operands of a loop with weights.
template <class T, class Product, bool Exact>
struct NormKeyOperands : ChunkOperands<T, Product> {
    using Scorer = typename ChunkOperands<T, Product>::Steps;
    using Updater = WeightedOperands<Scorer>;
};
template <class T, bool Exact>
struct WeightedTf32Products : ChunkOperands<T, T> {
    using Scorer = HalfOperands<T>;
    using Updater = WeightedTf32Operands<T, Exact>;
    using Inside = WeightedScoreOperands<typename Updater::A>;
};
template <>
struct NormKeyOperands<bf16, bf16, true> : WeightedTf32Products<bf16, true> {};
template <bool Exact>
struct NormKeyOperands<fp16, fp16, Exact> : WeightedTf32Products<fp16, Exact> {};

// What a loop needs of the norm: nothing, or the numbers of the chunks in use and the sums z.
template <class NormKey, class T, class Product, int Chunk, int BlockV, int Threads, int Stages>
class ChunkNormKey;

template <class T, class Product, int Chunk, int BlockV, int Threads, int Stages>
class ChunkNormKey<NoNormKey, T, Product, Chunk, BlockV, Threads, Stages> {
public:
    template <class Default>
    using Operands = Default;
    static constexpr int kSmemBytes = 0, kStepByStepBytes = 0;
    KGEN_DEVICE ChunkNormKey(const NoNormKey&, i64) {}
};

template <bool Exact, class T, class Product, int Chunk, int BlockV, int Threads, int Stages>
class ChunkNormKey<NormKeyRows<Exact>, T, Product, Chunk, BlockV, Threads, Stages> {
    // x, y, w, f and w y. The norm and the dot product lie in the first two until finish().
    enum Field { kX, kY, kWeight, kFactor, kWeightedY, kFields };

public:
    template <class Default>
    using Operands = NormKeyOperands<T, Product, Exact>;
    static constexpr int kSmemBytes = 4 * (Stages * kFields * Chunk + 2 * BlockV);
    static constexpr int kStepByStepBytes = 4 * BlockV;

    // The first chunk begins at step `first`.
    KGEN_DEVICE ChunkNormKey(const NormKeyRows<Exact>& rows, i64 first)
        : rows_(rows), next_(first) {}

    // z is rows.initial, or zero without `given`; `values` of the CTA's value features exist.
    KGEN_DEVICE void begin(float* memory, bool given, int values) {
        fields_ = memory;
        sums_ = memory + Stages * kFields * Chunk;
        for (int value = thread_rank(); value < BlockV; value += Threads)
            sums_[value] = given && rows_.initial != nullptr && value < values
                               ? rows_.initial[value] : 0.0f;
    }

    // Starts the copies of the next chunk, of which `left` steps exist.
    KGEN_DEVICE void start(int slot, int left) {
        for (int step = thread_rank(); step < Chunk; step += Threads) {
            const i64 t = (next_ + step) * rows_.direction;
            cp_async_or_zero<4>(field(slot, kX) + step, rows_.norm + t, step < left);
            cp_async_or_zero<4>(field(slot, kY) + step, rows_.gout_dot_out + t, step < left);
        }
        next_ += Chunk;
    }

    // Turns what this thread copied into the numbers of its steps; those beyond the sequence are zero.
    KGEN_DEVICE void finish(int slot, int left) {
        for (int step = thread_rank(); step < Chunk; step += Threads) {
            NormKeyStep of{};
            if (step < left) of = rows_.of(field(slot, kX)[step], field(slot, kY)[step]);
            field(slot, kX)[step] = of.x;
            field(slot, kY)[step] = of.y;
            field(slot, kWeight)[step] = of.weight;
            field(slot, kFactor)[step] = of.factor;
            field(slot, kWeightedY)[step] = of.weight * of.y;
        }
    }

    KGEN_DEVICE const float* weights(int slot) const { return field(slot, kWeight); }

    // What the key adds to the score of step t with step s of a chunk.
    KGEN_DEVICE float score(int slot, int t, int s) const {
        return field(slot, kX)[t] * field(slot, kY)[s];
    }

    // z after the chunk, from its rows v.
    KGEN_DEVICE void add_chunk(int chunk, int slot, const T* v, int stride) {
        if (!rows_.has_key) return;
        const float* weighted = field(slot, kWeightedY);
        const float* before = sums_ + chunk % 2 * BlockV;
        for (int value = thread_rank(); value < BlockV; value += Threads) {
            float sum[4] = {};  // four chains, to hide their latency
#pragma unroll
            for (int step = 0; step < Chunk; ++step)
                sum[step % 4] = fma(weighted[step], to_float(v[step * stride + value]), sum[step % 4]);
            sums_[(chunk + 1) % 2 * BlockV + value] =
                before[value] + ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
    }

    // f (O + x z) for a warp's outputs, whose first value feature is `value0`. Only one of the warps that share them
    // `adds` x z.
    template <int MTiles, int StepTiles>
    KGEN_DEVICE void apply(float (&outputs)[MTiles][StepTiles][4], int chunk, int slot, int value0,
                           bool adds) const {
        const MmaLane lane = mma_lane();
        float z[MTiles][2] = {};
        if (adds && rows_.has_key) {
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    z[m][half] = sums_[chunk % 2 * BlockV + value0 + 16 * m + lane.g + 8 * half];
        }
#pragma unroll
        for (int tile = 0; tile < StepTiles; ++tile)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int step = 8 * tile + 2 * lane.q + i;
                const float x = field(slot, kX)[step], factor = field(slot, kFactor)[step];
#pragma unroll
                for (int m = 0; m < MTiles; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float& out = outputs[m][tile][2 * half + i];
                        out = fma(x, z[m][half], out) * factor;
                    }
            }
    }

    // Stores z after all chunks, if it is wanted; each thread what it summed.
    KGEN_DEVICE void store_sums(int chunks, int values, float& nonfinite) const {
        if (rows_.end == nullptr) return;
        const int after = rows_.has_key ? chunks % 2 * BlockV : 0;
        for (int value = thread_rank(); value < values; value += Threads) {
            const float z = sums_[after + value];
            nonfinite = fma(z, 0.0f, nonfinite);
            rows_.end[value] = z;
        }
    }

private:
    KGEN_DEVICE float* field(int slot, Field which) const {
        return fields_ + (slot * kFields + which) * Chunk;
    }

    const NormKeyRows<Exact>& rows_;
    i64 next_;
    float* fields_;
    float* sums_;
};

}  // namespace kgen
