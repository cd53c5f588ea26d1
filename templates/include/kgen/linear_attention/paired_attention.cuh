// Outputs of two fragments of 16 steps of a warp, in registers (split_t_mma.cuh).
//
//     out_t = factor * (a_t S + sum over s <= t of (a_t b_s) v_s)
//
// The products are those of chunk_attention.cuh, which says why a score has a high and a low term. Differences:
// rows of `a` go from global memory to registers, so they take no shared memory and no barrier; and both
// fragments read a state together.
//
// Layout: b [steps][kKeyStride], v [steps][kValueStride] and S [keys][kValueStride] in shared memory; operand A of
// a and the accumulators of out in registers, as m16n8k16 has them.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// Keys, Values: features of a and b, and of v and out; BlockV: value features of a CTA; CopyBytes: alignment of
// rows of `a`; ScoreTerms: bf16 terms of a score.
template <class T, int Keys, int Values, int BlockV, int CopyBytes, int ScoreTerms>
class PairedAttention {
    static constexpr int kSteps = whole_fragments(Keys) / 16;  // of sums over keys
    static constexpr int kPairs = BlockV / 16;                  // of tiles of 8 values
    static constexpr int kHeld = kPairs % 2 == 0 ? 2 : 1;      // pairs whose operands B are held at once
    using Half = HalfOperands<T>;

    static_assert(sizeof(T) == 2 && BlockV % 16 == 0, "whole fragments of 16 bits");
    static_assert(ScoreTerms == 1 || ScoreTerms == 2, "a score rounded to bf16, and the remainder");

public:
    // Elements between two rows in shared memory: of b; of v and a state.
    static constexpr int kKeyStride = chunk_row_stride<T>(whole_fragments(Keys));
    static constexpr int kValueStride = chunk_row_stride<T>(BlockV);

    // Loads the rows of `a` of a fragment that begins at step `first`; `left` of its steps exist.
    template <int Which>
    KGEN_DEVICE void read(const StepRows<const T>& a, i64 first, int left) {
        const int g = mma_lane().g, column = column_of_quad();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const T* row = a.at(first + g + 8 * half) + column;
            const bool inside = g + 8 * half < left;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                const Vec<u32, 2> quad = quad_at(row + 16 * k, 16 * k + column, inside);
                a_[Which][k].pair[2 * half] = quad[0];
                a_[Which][k].pair[2 * half + 1] = quad[1];
            }
        }
    }

    // Turns what read() loaded into operands: the inverse of quad_of_row.
    template <int Which>
    KGEN_DEVICE void arrange() {
        const bool odd = mma_lane().q % 2 != 0;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            u32(&pair)[4] = a_[Which][k].pair;
            u32 left[2], right[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 first = pair[2 * half], second = pair[2 * half + 1];
                const u32 got = shfl_xor(odd ? first : second, 1);
                left[half] = odd ? got : first;
                right[half] = odd ? second : got;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                pair[half] = left[half];
                pair[2 + half] = right[half];
            }
        }
    }

    // O += A S, of both fragments.
    KGEN_DEVICE void carry(const T* state) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int n = 0; n < kPairs; ++n) {
                typename Half::B two[2];
                Half::two_columns(two, state + 16 * k * kValueStride + 16 * n, kValueStride);
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        Half::template multiply<0>(sums_[m][2 * n + i], a_[m][k], two[i]);
            }
    }

    // Attends from fragment number `own` to fragments [from, to) of b and v, none of which is later. Call arrange()
    // first.
    template <int Which>
    KGEN_DEVICE void intra_chunk(const T* b, const T* v, int own, int from, int to) {
#pragma unroll 1
        for (int i = from; i < to; ++i)
            attend_tile<Which>(b + 16 * i * kKeyStride, v + 16 * i * kValueStride, i == own);
    }

    // Writes the rows of a fragment: see write_fragment.
    template <int Which>
    KGEN_DEVICE float write(const RecurrenceRows<T>& rows, i64 first, int left) {
        return write_fragment<T, Values, BlockV>(sums_[Which], rows, first, left);
    }

private:
    // Four features of a row, from feature `column` on; padding features and steps are zeros.
    static KGEN_DEVICE Vec<u32, 2> quad_at(const T* row, int column, bool inside) {
        Vec<u32, 2> quad{};
        if (!inside) return quad;
        if constexpr (CopyBytes >= 8) {
            if (Keys % 16 == 0 || column < Keys)
                quad = load<Cache::prefetch_256>(reinterpret_cast<const Vec<u32, 2>*>(row));
        } else {
            float values[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) values[i] = column + i < Keys ? to_float(row[i]) : 0.0f;
            quad[0] = pack2<T>(values[0], values[1]);
            quad[1] = pack2<T>(values[2], values[3]);
        }
        return quad;
    }

    // O += (A B^T) V over 16 steps. own: they are the fragment's own steps and get the causal mask.
    template <int Which>
    KGEN_DEVICE void attend_tile(const T* b, const T* v, bool own) {
        float parts[2][2][4] = {};  // two independent chains of products, to hide their latency
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            typename Half::B two[2];
            Half::two_rows(two, b + 16 * k, kKeyStride);
#pragma unroll
            for (int i = 0; i < 2; ++i)
                Half::template multiply<0>(parts[k % 2][i], a_[Which][k], two[i]);
        }
        const MmaLane lane = mma_lane();
        typename Half::A hi, lo;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float two[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int of = i % 2 * 2 + j;
                two[j] = parts[0][i / 2][of] + parts[1][i / 2][of];
                const bool above = i == 2 || (i != 1 && 2 * lane.q + j > lane.g);  // the diagonal
                if (own && above) two[j] = 0.0f;
            }
            hi.pair[i] = pack2<T>(two[0], two[1]);
            const f32x2 back = unpack2<T>(hi.pair[i]);
            lo.pair[i] = pack2<T>(two[0] - back.x, two[1] - back.y);
        }
#pragma unroll
        for (int n = 0; n < kPairs; n += kHeld) {
            typename Half::B two[kHeld][2];
#pragma unroll
            for (int j = 0; j < kHeld; ++j)
                Half::two_columns(two[j], v + 16 * (n + j), kValueStride);
#pragma unroll
            for (int pass = 2 - ScoreTerms; pass < 2; ++pass)
#pragma unroll
                for (int i = 0; i < 2 * kHeld; ++i)
                    Half::template multiply<0>(sums_[Which][2 * n + i], pass == 0 ? lo : hi,
                                               two[i / 2][i % 2]);
        }
    }

    typename Half::A a_[2][kSteps];
    float sums_[2][2 * kPairs][4] = {};
};

}  // namespace kgen
