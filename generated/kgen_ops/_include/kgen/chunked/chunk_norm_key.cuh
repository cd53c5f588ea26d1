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
// x, y, z, w and f are fp32 for every dtype. x_t y_s is added to a score before the score is rounded: the two may
// nearly cancel. The outputs of a chunk get x_t z of the chunks before; z is summed from the rows v in shared memory.
//
// Weighted values: the update's operand is w_t v_t. fp32 values are multiplied before they are split, for the outputs
// too. 16-bit values become several terms for the update, because one rounded term would exceed the bound where terms
// of the sum cancel: bf16 values two bf16 terms, or with Exact (the final state is returned in fp32) three; fp16 values
// two TF32 terms, because w_t v_t may be too small for fp16. Outputs of 16-bit values need no such operand: scores,
// which have two terms in any case, are weighted.
//
// Reading the state: in gq and gk a_t S_t and x_t z_t nearly cancel, because gout . out is a mean of gout . v. So the
// state has two terms for 16 bits: bf16 two of bf16, fp16 two of TF32. One rounded term would exceed the bound.
//
// P V in fp32: q and k are positive, so a score is large beside the root of its terms' squares, and 3xTF32 may exceed
// the bound where its products with values of both signs cancel. Here it has six products.
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

// Operands of the update whose a_columns() multiplies each step's values by its weight: of fp32.
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

// The values of 16 steps times their weights, in fp32: pairs as in HalfOperands, of steps 2q + 8 (i / 2) and the next.
template <class T>
KGEN_DEVICE f32x2 weighted_pair(u32 pair, int i, const float* weights) {
    const Vec<float, 2> by =
        *reinterpret_cast<const Vec<float, 2>*>(weights + 2 * mma_lane().q + i / 2 * 8);
    const f32x2 two = unpack2<T>(pair);
    return f32x2{two.x * by[0], two.y * by[1]};
}

// bf16: A has several terms of bf16, the first one the largest.
template <int Terms>
struct WeightedBf16Operands {
    static constexpr int kStep = 16, kPasses = Terms;
    static constexpr bool kChained = Terms == 3;

    struct A {
        HalfOperands<bf16>::A values, terms[Terms];
    };
    using B = HalfOperands<bf16>::B;

    static KGEN_DEVICE A a_columns(const bf16* tile, int stride, const float* weights) {
        A a;
        a.values = HalfOperands<bf16>::a_columns(tile, stride);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            f32x2 rest = weighted_pair<bf16>(a.values.pair[i], i, weights);
#pragma unroll
            for (int term = 0; term < Terms; ++term) {
                const u32 rounded = pack2<bf16>(rest.x, rest.y);
                const f32x2 back = unpack2<bf16>(rounded);
                rest = f32x2{rest.x - back.x, rest.y - back.y};
                a.terms[term].pair[i] = rounded;
            }
        }
        return a;
    }

    static KGEN_DEVICE B b_columns(const bf16* tile, int stride) {
        return HalfOperands<bf16>::b_columns(tile, stride);
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        HalfOperands<bf16>::multiply<0>(sums, a.terms[Terms - 1 - Pass], b);
    }
};

// fp16: 16 steps are two products of 8; k = q, q + 4 of the first are steps 2q, 2q + 1, of the second those 8 later.
// A has two TF32 terms; B is exact.
struct WeightedFp16Operands {
    static constexpr int kStep = 16, kPasses = 2;
    static constexpr bool kChained = true;

    struct A {
        HalfOperands<fp16>::A values;
        Tf32Operands<true>::A half[2];
    };
    struct B {
        Fp16AsTf32Operands::B half[2];
    };

    static KGEN_DEVICE A a_columns(const fp16* tile, int stride, const float* weights) {
        A a;
        a.values = HalfOperands<fp16>::a_columns(tile, stride);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 two = weighted_pair<fp16>(a.values.pair[i], i, weights);
            Tf32Operands<true>::put(a.half[i / 2], i % 2, two.x);
            Tf32Operands<true>::put(a.half[i / 2], i % 2 + 2, two.y);
        }
        return a;
    }

    static KGEN_DEVICE B b_columns(const fp16* tile, int stride) {
        const auto pairs = HalfOperands<fp16>::b_columns(tile, stride);
        return B{{Fp16AsTf32Operands::exact(pairs.pair[0]), Fp16AsTf32Operands::exact(pairs.pair[1])}};
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            mma_tf32_m16n8k8(sums, Pass == 0 ? a.half[i].lo : a.half[i].hi, b.half[i].hi);
    }
};

// Operands of the product with the state (a S), which has two terms.
struct SplitBf16Carry {
    static constexpr int kStep = 16, kPasses = 2;
    static constexpr bool kChained = false;

    struct A {
        HalfOperands<bf16>::A hi, lo;
    };
    using B = HalfOperands<bf16>::B;

    template <class Tiles>
    static KGEN_DEVICE A of_sums(const Tiles& sums, int tile) {
        A a;
        a.hi = HalfOperands<bf16>::of_sums(sums, tile);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 back = unpack2<bf16>(a.hi.pair[i]);
            const float(&four)[4] = sums[tile + i / 2];
            a.lo.pair[i] = pack2<bf16>(four[i % 2 * 2] - back.x, four[i % 2 * 2 + 1] - back.y);
        }
        return a;
    }

    static KGEN_DEVICE B b_rows(const bf16* tile, int stride) {
        return HalfOperands<bf16>::b_rows(tile, stride);
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        HalfOperands<bf16>::multiply<0>(sums, Pass == 0 ? a.lo : a.hi, b);
    }
};

struct SplitFp16Carry {
    static constexpr int kStep = 8, kPasses = 2;
    static constexpr bool kChained = false;
    using A = Tf32Operands<true>::A;
    using B = Fp16AsTf32Operands::B;

    template <class Tiles>
    static KGEN_DEVICE A of_sums(const Tiles& sums, int tile) {
        return Tf32Operands<true>::of_sums(sums, tile);
    }

    static KGEN_DEVICE B b_rows(const fp16* tile, int stride) {
        return Fp16AsTf32Operands::b_rows(tile, stride);
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        mma_tf32_m16n8k8(sums, Pass == 0 ? a.lo : a.hi, b.hi);
    }
};

// P V of fp32, including the products that 3xTF32 leaves out: of two low terms, and of the bit of a term that mma
// ignores.
struct WholeSplitScoreOperands : SplitScoreOperands {
    template <int Count>
    static KGEN_DEVICE void ignored(u32 (&rest)[Count], const u32 (&lo)[Count]) {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            rest[i] = bit_cast<u32>(bit_cast<float>(lo[i]) - bit_cast<float>(lo[i] & 0xffffe000u));
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        if constexpr (Pass == 0) {
            u32 rest_a[4], rest_b[2];
            ignored(rest_a, a.lo);
            ignored(rest_b, b.lo);
            mma_tf32_m16n8k8(sums, rest_a, b.hi);
            mma_tf32_m16n8k8(sums, a.hi, rest_b);
            mma_tf32_m16n8k8(sums, a.lo, b.lo);
        }
        SplitScoreOperands::multiply<Pass>(sums, a, b);
    }
};

// P V of 16 bits: the values without their weights.
template <class T, class Updater>
struct UnweightedScoreOperands : ScoreOperands<T> {
    static KGEN_DEVICE auto of_values(const typename Updater::A& from, int step) {
        return ScoreOperands<T>::of_values(from.values, step);
    }
};

// Operands of a loop with weights.
template <class T, class Product, bool Exact>
struct NormKeyOperands : ChunkOperands<T, Product> {
    using Scorer = typename ChunkOperands<T, Product>::Steps;
    using Updater = WeightedOperands<Scorer>;
};
template <bool Exact>
struct NormKeyOperands<float, float, Exact> : ChunkOperands<float, float> {
    using Scorer = Tf32Operands<true>;
    using Updater = WeightedOperands<Scorer>;
    using Inside = WholeSplitScoreOperands;
};
template <class T, class Weighted, class StateTerms>
struct NormKeyHalfOperands : ChunkOperands<T, T> {
    using Scorer = HalfOperands<T>;
    using Updater = Weighted;
    using Carry = StateTerms;
    using Inside = UnweightedScoreOperands<T, Weighted>;
};
template <bool Exact>
struct NormKeyOperands<bf16, bf16, Exact>
    : NormKeyHalfOperands<bf16, WeightedBf16Operands<Exact ? 3 : 2>, SplitBf16Carry> {};
template <bool Exact>
struct NormKeyOperands<fp16, fp16, Exact>
    : NormKeyHalfOperands<fp16, WeightedFp16Operands, SplitFp16Carry> {};

// Operands of a loop without a norm whose state has two terms in 16 bits.
template <class T, class Default>
struct SplitStateOperands : Default {};
template <class Default>
struct SplitStateOperands<bf16, Default> : Default {
    using Carry = SplitBf16Carry;
};
template <class Default>
struct SplitStateOperands<fp16, Default> : Default {
    using Carry = SplitFp16Carry;
};

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

template <class T, class Product, int Chunk, int BlockV, int Threads, int Stages>
class ChunkNormKey<NoNormSplitState, T, Product, Chunk, BlockV, Threads, Stages>
    : public ChunkNormKey<NoNormKey, T, Product, Chunk, BlockV, Threads, Stages> {
public:
    template <class Default>
    using Operands = SplitStateOperands<T, Default>;
    KGEN_DEVICE ChunkNormKey(const NoNormKey& rows, i64 first)
        : ChunkNormKey<NoNormKey, T, Product, Chunk, BlockV, Threads, Stages>(rows, first) {}
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
        if (rows_.norm == nullptr) return;
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
            const bool given = rows_.norm != nullptr;
            NormKeyStep of{};
            if (step < left)
                of = rows_.of(given ? field(slot, kX)[step] : 1.0f,
                              given ? field(slot, kY)[step] : 0.0f);
            field(slot, kX)[step] = of.x;
            field(slot, kY)[step] = of.y;
            field(slot, kWeight)[step] = of.weight;
            field(slot, kFactor)[step] = of.factor;
            field(slot, kWeightedY)[step] = of.weight * of.y;
        }
    }

    KGEN_DEVICE const float* weights(int slot) const { return field(slot, kWeight); }

    // The score of step t with step s of a chunk, from that of the other keys.
    KGEN_DEVICE float score(int slot, int t, int s, float others) const {
        const float sum = fma(field(slot, kX)[t], field(slot, kY)[s], others);
        return sizeof(T) == 2 ? sum * field(slot, kWeight)[s] : sum;
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

    // Stores z after all chunks if the caller wants it; each thread stores what it summed.
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

    const NormKeyRows<Exact> rows_;  // a reference to a member of the loop would put all of it into local memory
    i64 next_;
    float* fields_;
    float* sums_;
};

}  // namespace kgen
