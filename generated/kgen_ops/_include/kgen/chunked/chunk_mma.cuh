// Operands and products of a chunk of a linear recurrence, on tensor cores (mma, sm_80).
//
//     state       S += B^T V       B [steps x keys], V [steps x values]
//     carried     O  = A S         A [steps x keys]: what the chunk reads of earlier chunks
//     scores      P  = A B^T       [steps x steps], with a causal mask
//     intra-chunk O += P V         what the chunk reads of its own steps
//
// How values are multiplied (struct ChunkOperands):
//   fp32, Product tf32   one product of operands rounded to TF32
//   fp32                 two TF32 terms per operand and three products (3xTF32), in short chains from zero (mma.cuh)
//   bf16                 directly; the state is rounded to bf16 as an operand (NoNormSplitState: to two terms)
//   fp16                 scores and update directly; the state and the scores as TF32, because sums overflow fp16
//
// A score always has two terms, high and low, of the operands' type. A score is a sum whose terms may all have one
// sign (queries and keys of feature maps do) while v has both signs: rounded once, its error would exceed all others.
//
// NaN and Inf: an operand that is NaN or Inf gives NaN or Inf in every product, so a finite output was computed from
// finite inputs. The opposite does not hold: Inf times the zeros of the causal mask, and the low terms of 3xTF32, give
// NaN for outputs that do not depend on that input. Callers check outputs and use step_by_step.cuh.
//
// Layout: a warp owns 16 * MTiles value features of S and O, both transposed: accumulators S^T and O^T, whose rows are
// value features. S^T stays in registers: accumulators whose columns (keys) are the k of O^T = S^T A^T are operand A
// of that product. V^T is the other operand A, loaded once for two products. All others are operand B, from shared
// memory.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/mma.cuh"

namespace kgen {

// x(1 + 0.7 * 2^-11), whose low 13 bits mma ignores: rounding to TF32 by one multiplication. The error is -0.65 to
// 0.7 ulp where to_tf32 has half an ulp; over all mantissas the mean error is about zero. TF32 numbers, NaN and Inf
// are kept.
constexpr float kNearTf32 = 1.00034180f;
KGEN_DEVICE u32 near_tf32(float x) { return bit_cast<u32>(x * kNearTf32); }

// x = hi + lo + e with |e| <= 2^-21 |x|, of either sign. Unlike split_tf32 it leaves the low bits of lo for mma to
// ignore, which saves an addition; lo is NaN where x is not finite.
KGEN_DEVICE void split_tf32_finite(float x, u32& hi, u32& lo) {
    hi = (bit_cast<u32>(x) + 0x1000u) & 0xffffe000u;
    lo = bit_cast<u32>(x - bit_cast<float>(hi));
}

// TF32 operands, one pass or three, from fp32 in shared memory. A step is 8 of k.
//
// `_rows`: k runs along the columns of a tile; k = q, q + 4 of a fragment are columns 2q, 2q + 1, which one load reads
// and which an accumulator has, too. `_columns`: k runs along the rows, in their order.
template <bool Split>
struct Tf32Operands {
    static constexpr int kStep = 8;
    static constexpr int kPasses = Split ? 3 : 1;
    static constexpr bool kChained = Split;

    struct A {
        u32 hi[4], lo[Split ? 4 : 1];
    };
    struct B {
        u32 hi[2], lo[Split ? 2 : 1];
    };

    template <class Fragment>
    static KGEN_DEVICE void put(Fragment& fragment, int i, float x) {
        if constexpr (Split) {
            split_tf32_finite(x, fragment.hi[i], fragment.lo[i]);
        } else {
            fragment.hi[i] = near_tf32(x);
            fragment.lo[0] = 0;
        }
    }

    static KGEN_DEVICE A a_rows(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        A a;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Vec<float, 2> two = *reinterpret_cast<const Vec<float, 2>*>(
                tile + (lane.g + 8 * half) * stride + 2 * lane.q);
            put(a, half, two[0]);
            put(a, half + 2, two[1]);
        }
        return a;
    }

    static KGEN_DEVICE B b_rows(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        const Vec<float, 2> two =
            *reinterpret_cast<const Vec<float, 2>*>(tile + lane.g * stride + 2 * lane.q);
        B b;
        put(b, 0, two[0]);
        put(b, 1, two[1]);
        return b;
    }

    static KGEN_DEVICE A a_columns(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            put(a, i, tile[(lane.q + i / 2 * 4) * stride + lane.g + i % 2 * 8]);
        return a;
    }

    static KGEN_DEVICE B b_columns(const float* tile, int stride) {
        const MmaLane lane = mma_lane();
        B b;
#pragma unroll
        for (int i = 0; i < 2; ++i) put(b, i, tile[(lane.q + 4 * i) * stride + lane.g]);
        return b;
    }

    // Operand A from one tile of accumulators; k runs along its columns.
    template <class Tiles>
    static KGEN_DEVICE A of_sums(const Tiles& sums, int tile) {
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i) put(a, i, sums[tile][i % 2 * 2 + i / 2]);
        return a;
    }

    // Passes in the order of their magnitude, smallest first.
    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        if constexpr (Split) {
            mma_tf32_m16n8k8(sums, Pass == 0 ? a.lo : a.hi, Pass == 1 ? b.lo : b.hi);
        } else {
            mma_tf32_m16n8k8(sums, a.hi, b.hi);
        }
    }
};

// 16-bit operands, from shared memory by ldmatrix. A step is 16 of k, in order.
template <class T>
struct HalfOperands {
    static constexpr int kStep = 16;
    static constexpr int kPasses = 1;
    static constexpr bool kChained = false;

    struct A {
        u32 pair[4];
    };
    struct B {
        u32 pair[2];
    };

    static KGEN_DEVICE A a_rows(const T* tile, int stride) {
        const int lane = lane_id();
        A a;
        ldmatrix<4>(a.pair, tile + lane % 16 * stride + lane / 16 * 8);
        return a;
    }

    static KGEN_DEVICE B b_rows(const T* tile, int stride) {
        const int lane = lane_id();
        B b;
        ldmatrix<2>(b.pair, tile + lane % 8 * stride + lane / 8 % 2 * 8);
        return b;
    }

    static KGEN_DEVICE A a_columns(const T* tile, int stride) {
        const int lane = lane_id();
        A a;
        ldmatrix<4, true>(a.pair, tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
        return a;
    }

    static KGEN_DEVICE B b_columns(const T* tile, int stride) {
        B b;
        ldmatrix<2, true>(b.pair, tile + lane_id() % 16 * stride);
        return b;
    }

    // b_rows and b_columns of two neighbouring tiles, by one ldmatrix.
    static KGEN_DEVICE void two_rows(B (&b)[2], const T* tile, int stride) {
        const int lane = lane_id();
        u32 words[4];
        ldmatrix<4>(words, tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
        split(b, words);
    }

    static KGEN_DEVICE void two_columns(B (&b)[2], const T* tile, int stride) {
        const int lane = lane_id();
        u32 words[4];
        ldmatrix<4, true>(words, tile + lane % 16 * stride + lane / 16 * 8);
        split(b, words);
    }

    static KGEN_DEVICE void split(B (&b)[2], const u32 (&words)[4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2].pair[i % 2] = words[i];
    }

    // Operand A from two neighbouring tiles of accumulators.
    template <class Tiles>
    static KGEN_DEVICE A of_sums(const Tiles& sums, int tile) {
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a.pair[i] = pack2<T>(sums[tile + i / 2][i % 2 * 2], sums[tile + i / 2][i % 2 * 2 + 1]);
        return a;
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        mma_m16n8k16<T>(sums, a.pair, b.pair);
    }
};

// fp16 in shared memory as TF32, exactly; the state is fp32.
struct Fp16AsTf32Operands : Tf32Operands<false> {
    static KGEN_DEVICE B exact(u32 pair) {
        const f32x2 two = unpack2<fp16>(pair);
        return B{{bit_cast<u32>(two.x), bit_cast<u32>(two.y)}, {}};
    }

    static KGEN_DEVICE B b_rows(const fp16* tile, int stride) {
        const MmaLane lane = mma_lane();
        return exact(*reinterpret_cast<const u32*>(tile + lane.g * stride + 2 * lane.q));
    }
};

// P V: one product for the low terms of the scores and one for the high terms, both accumulated in the outputs. Scores
// are stored as `Score` in kPlanes tiles; rows of a tile have Chunk + kOffset elements.
template <class T>
struct ScoreOperands {  // fp32, TF32: k in the order of a_columns
    using A = Tf32Operands<false>::A;
    using Score = float;
    static constexpr int kStep = 8, kPasses = 2, kPlanes = 1, kOffset = 4;
    static constexpr bool kChained = false;

    struct B {
        u32 hi[2], lo[2];
    };

    static KGEN_DEVICE void put(B& b, int i, float x) {
        b.hi[i] = bit_cast<u32>(x) & 0xffffe000u;
        b.lo[i] = bit_cast<u32>(x - bit_cast<float>(b.hi[i]));
    }

    static KGEN_DEVICE void store(float* tile, int, const float (&two)[2]) {
        *reinterpret_cast<Vec<float, 2>*>(tile) = {{two[0], two[1]}};
    }

    static KGEN_DEVICE B b_scores(const float* tile, int stride, int) {
        const MmaLane lane = mma_lane();
        B b;
#pragma unroll
        for (int i = 0; i < 2; ++i) put(b, i, tile[lane.g * stride + lane.q + 4 * i]);
        return b;
    }

    static KGEN_DEVICE const A& of_values(const A& values, int) { return values; }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        mma_tf32_m16n8k8(sums, a.hi, Pass == 0 ? b.lo : b.hi);
    }
};

template <>
struct ScoreOperands<fp16> : ScoreOperands<float> {
    static constexpr int kOffset = 8;

    // k = q, q + 4 are columns 2q, 2q + 1, as in of_values().
    static KGEN_DEVICE B b_scores(const float* tile, int stride, int) {
        const MmaLane lane = mma_lane();
        const Vec<float, 2> two =
            *reinterpret_cast<const Vec<float, 2>*>(tile + lane.g * stride + 2 * lane.q);
        B b;
        put(b, 0, two[0]);
        put(b, 1, two[1]);
        return b;
    }

    // Step `step` (0 or 1) of the two steps of 8 in a fragment of 16-bit values.
    static KGEN_DEVICE A of_values(const HalfOperands<fp16>::A& from, int step) {
        A a = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const f32x2 two = unpack2<fp16>(from.pair[i + 2 * step]);
            a.hi[i] = bit_cast<u32>(two.x);
            a.hi[i + 2] = bit_cast<u32>(two.y);
        }
        return a;
    }
};

template <>
struct ScoreOperands<bf16> {
    using A = HalfOperands<bf16>::A;
    using Score = bf16;
    static constexpr int kStep = 16, kPasses = 2, kPlanes = 2, kOffset = 8;
    static constexpr bool kChained = false;

    struct B {
        HalfOperands<bf16>::B hi, lo;
    };

    static KGEN_DEVICE void store(bf16* tile, int plane, const float (&two)[2]) {
        const u32 hi = pack2<bf16>(two[0], two[1]);
        const f32x2 back = unpack2<bf16>(hi);
        *reinterpret_cast<u32*>(tile) = hi;
        *reinterpret_cast<u32*>(tile + plane) = pack2<bf16>(two[0] - back.x, two[1] - back.y);
    }

    static KGEN_DEVICE B b_scores(const bf16* tile, int stride, int plane) {
        return B{HalfOperands<bf16>::b_rows(tile, stride),
                 HalfOperands<bf16>::b_rows(tile + plane, stride)};
    }

    static KGEN_DEVICE const A& of_values(const A& values, int) { return values; }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        HalfOperands<bf16>::multiply<0>(sums, a, Pass == 0 ? b.lo : b.hi);
    }
};

// 3xTF32, in chains.
struct SplitScoreOperands : Tf32Operands<true> {
    using Score = float;
    static constexpr int kPlanes = 1, kOffset = 4;

    static KGEN_DEVICE void store(float* tile, int plane, const float (&two)[2]) {
        ScoreOperands<float>::store(tile, plane, two);
    }

    static KGEN_DEVICE B b_scores(const float* tile, int stride, int) {
        const MmaLane lane = mma_lane();
        B b;
#pragma unroll
        for (int i = 0; i < 2; ++i) put(b, i, tile[lane.g * stride + lane.q + 4 * i]);
        return b;
    }

    static KGEN_DEVICE const A& of_values(const A& values, int) { return values; }
};

// The operand types of each product: Steps for scores and update, from shared memory; Carry for the state; Inside for
// the scores (intra-chunk).
template <class T, class Product>
struct ChunkOperands {
    static_assert(sizeof(T) == 4, "there are fp32 (Product fp32 or tf32), fp16 and bf16");
    using Steps = Tf32Operands<false>;
    using Carry = Steps;
    using Inside = ScoreOperands<T>;
};
template <>
struct ChunkOperands<float, float> {
    using Steps = Tf32Operands<true>;
    using Carry = Steps;
    using Inside = SplitScoreOperands;
};
template <>
struct ChunkOperands<bf16, bf16> {
    using Steps = HalfOperands<bf16>;
    using Carry = Steps;
    using Inside = ScoreOperands<bf16>;
};
template <>
struct ChunkOperands<fp16, fp16> {
    using Steps = HalfOperands<fp16>;
    using Carry = Fp16AsTf32Operands;
    using Inside = ScoreOperands<fp16>;
};

// One pass of multiply_group: targets[m][offset + n] += a[m][k] * b[n][k] where there[n][k].
template <class Operands, int Pass, int MTiles, int Group, int Count, int Tiles>
KGEN_DEVICE void multiply_pass(float (&targets)[MTiles][Tiles][4], int offset,
                               const typename Operands::A (&a)[MTiles][Count],
                               const typename Operands::B (&b)[Group][Count],
                               const bool (&there)[Group][Count]) {
#pragma unroll
    for (int k = 0; k < Count; ++k)
#pragma unroll
        for (int n = 0; n < Group; ++n)
#pragma unroll
            for (int m = 0; m < MTiles; ++m)
                if (there[n][k])
                    Operands::template multiply<Pass>(targets[m][offset + n], a[m][k], b[n][k]);
}

// sums[m][first + n] += a[m][k] * b[n][k], summed over the k of `Count` steps, for the (n, k) for which load(n, k, b)
// returns true. With Operands::kChained (fp32 accuracy), or if Scaled, the products form a chain of their own that is
// added at the end; if Scaled, the chain is multiplied by `factor`.
template <class Operands, int MTiles, int Group, int Count, bool Scaled = false, int Tiles, class Load>
KGEN_DEVICE void multiply_group(float (&sums)[MTiles][Tiles][4], int first,
                                const typename Operands::A (&a)[MTiles][Count], Load load,
                                [[maybe_unused]] float factor = 1.0f) {
    typename Operands::B b[Group][Count];
    bool there[Group][Count];
#pragma unroll
    for (int n = 0; n < Group; ++n)
#pragma unroll
        for (int k = 0; k < Count; ++k) there[n][k] = first + n < Tiles && load(n, k, b[n][k]);

    if constexpr (!Operands::kChained && !Scaled) {
        multiply_pass<Operands, 0>(sums, first, a, b, there);
        if constexpr (Operands::kPasses == 2) multiply_pass<Operands, 1>(sums, first, a, b, there);
    } else {
        float chain[MTiles][Group][4] = {};
        multiply_pass<Operands, 0>(chain, 0, a, b, there);
        if constexpr (Operands::kPasses >= 2) multiply_pass<Operands, 1>(chain, 0, a, b, there);
        if constexpr (Operands::kPasses == 3) multiply_pass<Operands, 2>(chain, 0, a, b, there);
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int n = 0; n < Group; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (first + n >= Tiles) continue;
                    float& sum = sums[m][first + n][i];
                    sum = Scaled ? fma(chain[m][n][i], factor, sum) : sum + chain[m][n][i];
                }
    }
}

}  // namespace kgen
