// What the loop of chunk_loop.cuh needs of decays within a chunk, and the sums over lanes that decays use.
//
//     out_t = factor * a_t (S_{t-1} + diag(u) b_t v_t^T)     S_t = diag(d_t) S_{t-1} + b_t v_t^T
//
// Decays d_t are from 0 to 1, both included, in the forms of decay_form.cuh. With products over steps of one chunk the
// four products of chunk_mma.cuh become
//
//     carried    A' S      a'_t = a_t * (d of the steps before t)
//     state      S = diag(all d) S + B'^T V,   b'_t = b_t * (d of the steps after t)
//     scores     P_ts = sum_k a_t b_s (d of the steps between s and t), P_tt = sum_k a_t u b_t
//     inside     P V, as without decays
//
// Products are accumulated outwards from their first step, never formed as quotients or differences: decays of exactly
// 0 and 1 stay exact, and -inf makes no NaN. halving_decay.cuh has the rows and scores.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// S += B^T V with V of 16 bits and B in fp32, both as TF32. Of 16 steps the even ones are one
// product, the odd ones another: k = q, q + 4 are steps 2q, 2q + 8, or the ones after them.
// Split: B is two TF32 numbers, so that S is as good as fp32's; else it was rounded when it was stored.
template <class T, bool Split>
struct MixedOperands {
    static constexpr int kStep = 16, kPasses = Split ? 2 : 1;
    static constexpr bool kChained = Split;

    struct A {
        u32 even[4], odd[4];
    };
    struct B {
        typename Tf32Operands<Split>::B even, odd;
    };

    static KGEN_DEVICE A a_columns(const T* tile, int stride) {
        return unpacked(HalfOperands<T>::a_columns(tile, stride).pair);
    }

    // The operand of pairs of steps.
    static KGEN_DEVICE A unpacked(const u32 (&pairs)[4]) {
        A a;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const f32x2 two = unpack2<T>(pairs[i]);
            a.even[i] = bit_cast<u32>(two.x);
            a.odd[i] = bit_cast<u32>(two.y);
        }
        return a;
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
        if constexpr (Split && Pass == 0) {
            mma_tf32_m16n8k8(sums, a.even, b.even.lo);
            mma_tf32_m16n8k8(sums, a.odd, b.odd.lo);
        } else {
            mma_tf32_m16n8k8(sums, a.even, b.even.hi);
            mma_tf32_m16n8k8(sums, a.odd, b.odd.hi);
        }
    }
};

// Operands of a loop: Scorer for the scores, Updater for the state, the others as in ChunkOperands.
template <class T, class Product, bool Decays>
struct LoopOperands : ChunkOperands<T, Product> {
    using Scorer = typename ChunkOperands<T, Product>::Steps;
    using Updater = Scorer;
};

// Sum each of `Count` values over the warp's lanes: a lane gets the sum of values[lane * Count / 32].
template <int Count, int Bit = kWarpSize / 2, int Size>
KGEN_DEVICE float fold_lanes(float (&values)[Size]) {
    if constexpr (Count > 1) {
        const bool high = (lane_id() & Bit) != 0;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            const float low_value = values[i], high_value = values[i + Count / 2];
            values[i] = (high ? high_value : low_value) +
                        shfl_xor(high ? low_value : high_value, Bit);
        }
    } else {
        values[0] += shfl_xor(values[0], Bit);
    }
    if constexpr (Bit > 1) return fold_lanes<max(Count / 2, 1), Bit / 2>(values);
    return values[0];
}

// Whether rows with decays have their keys in order. If so, columns 2q and 2q + 1 of a tile of the state are its keys q
// and q + 4.
template <class Decay>
constexpr bool kRowsInKeyOrder = false;

// The decays of a loop: none, or those of the chunk in use, in shared memory (halving_decay.cuh). Precise: exponentials
// as accurate as fp32; else by the special function unit.
template <class Decay, class T, int Keys, int Padded, int Chunk, int Warps, int Stages,
          int CopyBytes, bool Precise>
class ChunkDecay;

template <class T, int Keys, int Padded, int Chunk, int Warps, int Stages, int CopyBytes,
          bool Precise>
class ChunkDecay<NoDecayRows, T, Keys, Padded, Chunk, Warps, Stages, CopyBytes, Precise> {
public:
    using Row = T;  // element type of rows for the products
    static constexpr int kStride = chunk_row_stride<T>(Padded), kUpdateStride = kStride;
    static constexpr int kSmemBytes = 0;
    KGEN_DEVICE ChunkDecay(const NoDecayRows&, i64) {}
};

}  // namespace kgen
