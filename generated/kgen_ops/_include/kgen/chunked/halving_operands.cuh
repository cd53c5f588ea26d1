// Operands of tensor-core products for the loop of chunk_halving.cuh, whose rows halving_decay.cuh stores.
//
//     WordOperands      TF32, or two TF32 terms: rows with decays, and the state
//     CopiedOperands    16-bit rows as copied
//     KeyMajorOperands  b' of the state, stored by keys
//
// All are read by ldmatrix, four or two 8 x 8 matrices of 16 bits at a time; in fp32 such a matrix is eight rows of
// four elements. Rows must be multiples of 16 bytes.
#pragma once

#include "kgen/chunked/chunk_decay.cuh"

namespace kgen {

// Selects the products of a loop with HalvingRows. Returned: the state is returned in fp32. Pairs: see HalvingRows.
template <bool Returned, bool Pairs = false>
struct HalvingProducts {};

// TF32 operands of 8 * Parts keys: words q and q + 4 of a part are k = q and q + 4. `of_sums` has the keys 2q and
// 2q + 1 there, so rows that are multiplied with a state are stored with the even ones of eight keys first.
template <bool Split, int Parts>
struct WordOperands {
    static constexpr int kStep = 8 * Parts;
    static constexpr int kPasses = Split ? 3 : 1;
    static constexpr bool kChained = Split;

    struct A {
        u32 hi[Parts][4], lo[Split ? Parts : 1][4];
    };
    struct B {
        u32 hi[Parts][2], lo[Split ? Parts : 1][2];
    };

    template <class Fragment>
    static KGEN_DEVICE void put(Fragment& fragment, int part, int i, u32 word) {
        if constexpr (Split) {
            split_tf32_finite(bit_cast<float>(word), fragment.hi[part][i], fragment.lo[part][i]);
        } else {
            fragment.hi[part][i] = word;
        }
    }

    static KGEN_DEVICE A a_of_rows(const float* row) {
        A a = {};
#pragma unroll
        for (int part = 0; part < Parts; ++part) {
            u32 words[4];
            ldmatrix<4>(words, row + 8 * part + lane_id() / 16 * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) put(a, part, i, words[i]);
        }
        return a;
    }

    static KGEN_DEVICE A a_rows(const float* tile, int stride) {
        return a_of_rows(tile + lane_id() % 16 * stride);
    }

    // Eight rows twice, for a product of which rows 8 to 15 are used.
    static KGEN_DEVICE A a_rows_twice(const float* tile, int stride) {
        return a_of_rows(tile + lane_id() % 8 * stride);
    }

    static KGEN_DEVICE B b_rows(const float* tile, int stride) {
        const int lane = lane_id();
        u32 words[2 * Parts];
        ldmatrix<2 * Parts>(words, tile + lane % 8 * stride + lane / 8 % (2 * Parts) * 4);
        B b = {};
#pragma unroll
        for (int i = 0; i < 2 * Parts; ++i) put(b, i / 2, i % 2, words[i]);
        return b;
    }

    // Operand A from `Parts` neighbouring tiles of accumulators.
    template <class Tiles>
    static KGEN_DEVICE A of_sums(const Tiles& sums, int tile) {
        A a = {};
#pragma unroll
        for (int i = 0; i < 4 * Parts; ++i) {
            const float x = sums[tile + i / 4][i % 2 * 2 + i % 4 / 2];
            put(a, i / 4, i % 4, Split ? bit_cast<u32>(x) : near_tf32(x));
        }
        return a;
    }

    template <int Pass>
    static KGEN_DEVICE void multiply(float (&sums)[4], const A& a, const B& b) {
#pragma unroll
        for (int part = 0; part < Parts; ++part) {
            if constexpr (Split) {
                mma_tf32_m16n8k8(sums, Pass == 0 ? a.lo[part] : a.hi[part],
                                 Pass == 1 ? b.lo[part] : b.hi[part]);
            } else {
                mma_tf32_m16n8k8(sums, a.hi[part], b.hi[part]);
            }
        }
    }
};

// Operands of rows as copied.
template <class T>
struct CopiedOperands : HalfOperands<T> {
    using typename HalfOperands<T>::A;

    static KGEN_DEVICE A a_rows_twice(const T* tile, int stride) {
        const int lane = lane_id();
        A a;
        ldmatrix<4>(a.pair, tile + lane % 8 * stride + lane / 16 * 8);
        return a;
    }
};

template <class T, class Scorer>
struct CopiedRows {
    using Type = CopiedOperands<T>;
};
template <class Scorer>
struct CopiedRows<float, Scorer> {
    using Type = Scorer;
};

// Which of eight rows becomes row `row` of an operand. With Pairs, rows 2q and 2q + 1 of the operand are rows q and
// q + 4: this applies to the keys of the state's columns and to the steps of V.
template <bool Pairs>
KGEN_DEVICE int operand_row(int row) {
    return Pairs ? row / 2 + row % 2 * 4 : row;
}

// S += B^T V with B stored by keys. With 16 bits, the even ones of 16 steps are in the first eight rows; with Pairs,
// the steps of quarters 0 and 2 are.
template <class T, bool Split, bool Pairs>
struct KeyMajorOperands : MixedOperands<T, Split> {
    using typename MixedOperands<T, Split>::A;
    using typename MixedOperands<T, Split>::B;

    static KGEN_DEVICE A a_columns(const T* tile, int stride) {
        if constexpr (!Pairs) {
            return MixedOperands<T, Split>::a_columns(tile, stride);
        } else {
            const int lane = lane_id();
            const T* row = tile + (operand_row<Pairs>(lane % 8) + lane / 16 * 8) * stride;
            u32 pairs[4];
            ldmatrix<4, true>(pairs, row + lane / 8 % 2 * 8);
            return MixedOperands<T, Split>::unpacked(pairs);
        }
    }

    static KGEN_DEVICE B b_columns(const float* tile, int stride) {
        const int lane = lane_id();
        u32 words[4];
        ldmatrix<4>(words, tile + (operand_row<Pairs>(lane % 8) + lane / 16 * 8) * stride +
                               lane / 8 % 2 * 4);
        B b = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if constexpr (Split) {
                Tf32Operands<true>::put(b.even, i, bit_cast<float>(words[i]));
                Tf32Operands<true>::put(b.odd, i, bit_cast<float>(words[2 + i]));
            } else {
                b.even.hi[i] = words[i];
                b.odd.hi[i] = words[2 + i];
            }
        }
        return b;
    }
};
template <bool Split, bool Pairs>
struct KeyMajorOperands<float, Split, Pairs> : Tf32Operands<true> {
    static KGEN_DEVICE B b_columns(const float* tile, int stride) {
        const int lane = lane_id();
        u32 words[2];
        ldmatrix<2>(words, tile + operand_row<Pairs>(lane % 8) * stride + lane / 8 % 2 * 4);
        B b;
#pragma unroll
        for (int i = 0; i < 2; ++i) put(b, i, bit_cast<float>(words[i]));
        return b;
    }
};

template <class T, bool Split, bool SplitUpdate, bool Pairs>
struct HalvingOperands : ChunkOperands<T, T> {
    using Carry = WordOperands<Split, Split ? 1 : 2>;  // two terms of two parts would take the registers of the state
    using Scorer = WordOperands<Split, 2>;
    using Updater = KeyMajorOperands<T, SplitUpdate, Pairs>;
};
template <bool Returned, bool Pairs>
struct LoopOperands<float, HalvingProducts<Returned, Pairs>, true>
    : HalvingOperands<float, true, true, Pairs> {};
template <bool Returned, bool Pairs>
struct LoopOperands<fp16, HalvingProducts<Returned, Pairs>, true>
    : HalvingOperands<fp16, true, Returned, Pairs> {};
template <bool Returned, bool Pairs>
struct LoopOperands<bf16, HalvingProducts<Returned, Pairs>, true>
    : HalvingOperands<bf16, false, Returned, Pairs> {};

}  // namespace kgen
