// The outputs of 16 or 32 steps of a chunk, by one warp (mma m16n8k16).
//
//     out_t = factor * (a_t S + sum over s <= t of (a_t b_s) v_s)
//
// This is causal attention without softmax, plus the state before the chunk. The warp keeps its rows of a and of the
// outputs in registers. It reads the state once, and b and v of its own and all earlier steps, 16 at a time. The
// accumulators of the scores A B^T are operand A of the product with V.
//
// A score has a high and a low term (see chunk_mma.cuh for why). NaN and Inf are found in the outputs.
//
// Layout: a, b [steps][kKeyStride], v [steps][kValueStride] and the state, [keys][kValueStride] or transposed
// [values][kKeyStride], in shared memory.
//
// Synchronisation: none here. The caller's barrier precedes the first read.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// `features` rounded up to whole fragments of 16.
KGEN_DEVICE constexpr int whole_fragments(int features) { return (features + 15) / 16 * 16; }

// Pairs of columns 2q, 2q + 1 of a row, from two neighbouring tiles of 8 columns. Neighbouring lanes swap a pair, so
// that each lane has four columns of one tile, from column_of_quad() on, and stores whole sectors.
KGEN_DEVICE Vec<u32, 2> quad_of_pairs(u32 of_left, u32 of_right) {
    const bool odd = mma_lane().q % 2 != 0;
    const u32 got = shfl_xor(odd ? of_left : of_right, 1);
    return {{odd ? got : of_left, odd ? of_right : got}};
}

// The same of row g (half 0) or g + 8 (half 1) of two tiles of accumulators, as T.
template <class T>
KGEN_DEVICE Vec<u32, 2> quad_of_row(const float (&left)[4], const float (&right)[4], int half) {
    return quad_of_pairs(pack2<T>(left[2 * half], left[2 * half + 1]),
                         pack2<T>(right[2 * half], right[2 * half + 1]));
}

KGEN_DEVICE int column_of_quad() {
    const int q = mma_lane().q;
    return q % 2 * 8 + q / 2 * 4;
}

// Keys, Values: features of a and b, and of v and out; BlockV: value features of a CTA; StepTiles: fragments of 16
// steps of a warp, for which it reads b, v and the state once. Scaled: scores are multiplied by rows.value_factor.
template <class T, int Keys, int Values, int BlockV, int StepTiles, bool Scaled>
class ChunkAttention {
    static constexpr int kSteps = whole_fragments(Keys) / 16;  // of sums over keys
    static constexpr int kPairs = BlockV / 16;                  // of tiles of 8 values
    static constexpr int kHeld = kPairs % 2 == 0 ? 2 : 1;  // pairs whose operands B are held at once
    using Half = HalfOperands<T>;

    static_assert(sizeof(T) == 2 && BlockV % 16 == 0, "whole fragments of 16 bits");

public:
    // Elements between two rows in shared memory: of a, b and a transposed state; of v and a state.
    static constexpr int kKeyStride = chunk_row_stride<T>(whole_fragments(Keys));
    static constexpr int kValueStride = chunk_row_stride<T>(BlockV);

    // tile: the warp's first fragment of 16 steps in the chunk.
    KGEN_DEVICE ChunkAttention(const RecurrenceRows<T>& rows, int tile) : rows_(rows), tile_(tile) {}

    // Loads the warp's rows of a; `a` points to the chunk's first row.
    KGEN_DEVICE void read(const T* a) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int m = 0; m < StepTiles; ++m)
                a_[m][k] = Half::a_rows(a + 16 * (tile_ + m) * kKeyStride + 16 * k, kKeyStride);
    }

    // O += A S. Transposed: a row of the state belongs to a value feature, not to a key.
    template <bool Transposed>
    KGEN_DEVICE void carry(const T* state) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int n = 0; n < kPairs; ++n) {
                typename Half::B two[2];
                if constexpr (Transposed) {
                    Half::two_rows(two, state + 16 * n * kKeyStride + 16 * k, kKeyStride);
                } else {
                    Half::two_columns(two, state + 16 * k * kValueStride + 16 * n, kValueStride);
                }
#pragma unroll
                for (int m = 0; m < StepTiles; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        Half::template multiply<0>(sums_[m][2 * n + i], a_[m][k], two[i]);
            }
    }

    // O += (A B^T) V over all earlier steps of the chunk and the warp's own ones, masked. b and v: rows of the chunk.
    KGEN_DEVICE void intra_chunk(const T* b, const T* v) {
#pragma unroll 1
        for (int tile = 0; tile < tile_; ++tile) look<-1>(b, v, tile);
        look<0>(b, v, tile_);
        if constexpr (StepTiles > 1) look<1>(b, v, tile_ + 1);
    }

    // Scales and writes the rows; the chunk begins at step `first`, `left` of its steps exist. bias: added to out, one
    // per value feature of the CTA, or null. Returns NaN if any output is not finite.
    KGEN_DEVICE float write(i64 first, int left, const float* bias) {
        float nonfinite = 0.0f;
#pragma unroll
        for (int m = 0; m < StepTiles; ++m) {
            const int step = 16 * (tile_ + m) + mma_lane().g;
#pragma unroll
            for (int i = 0; i < 8 * kPairs; ++i) {
                float& sum = sums_[m][i / 4][i % 4];
                sum *= rows_.out_factor;
                if (bias != nullptr && value_of(i) < rows_.values) sum += bias[value_of(i)];
                nonfinite = fma(sum, 0.0f, nonfinite);
            }
            if constexpr (Values % 4 == 0) {
                write_quads(sums_[m], first, step, left);
            } else {
#pragma unroll
                for (int i = 0; i < 8 * kPairs; ++i) {
                    const int t = step + i % 4 / 2 * 8;
                    if (t < left && value_of(i) < rows_.values)
                        rows_.out.at(first + t)[value_of(i)] =
                            from_float<T>(sums_[m][i / 4][i % 4]);
                }
            }
        }
        return nonfinite;
    }

private:
    // O += (A B^T) V over the 16 steps of `tile`. Own: which of the warp's fragments these steps are; it gets the
    // causal mask, and fragments before it are skipped. -1: the steps are earlier than all of the warp's fragments.
    template <int Own>
    KGEN_DEVICE void look(const T* all_b, const T* all_v, int tile) {
        constexpr int kFirst = max(Own, 0);
        // Two independent chains of products, to hide their latency.
        float parts[StepTiles][2][2][4] = {};
        const T* b = all_b + 16 * tile * kKeyStride;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            typename Half::B two[2];
            Half::two_rows(two, b + 16 * k, kKeyStride);
#pragma unroll
            for (int m = kFirst; m < StepTiles; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    Half::template multiply<0>(parts[m][k % 2][i], a_[m][k], two[i]);
        }
        typename Half::A hi[StepTiles], lo[StepTiles];
#pragma unroll
        for (int m = kFirst; m < StepTiles; ++m) split_scores(hi[m], lo[m], parts[m], m == Own);
        const T* v = all_v + 16 * tile * kValueStride;
#pragma unroll
        for (int n = 0; n < kPairs; n += kHeld) {
            typename Half::B two[kHeld][2];
#pragma unroll
            for (int j = 0; j < kHeld; ++j)
                Half::two_columns(two[j], v + 16 * (n + j), kValueStride);
#pragma unroll
            for (int pass = 0; pass < 2; ++pass)
#pragma unroll
                for (int m = kFirst; m < StepTiles; ++m)
#pragma unroll
                    for (int i = 0; i < 2 * kHeld; ++i)
                        Half::template multiply<0>(sums_[m][2 * n + i], pass == 0 ? lo[m] : hi[m],
                                                   two[i / 2][i % 2]);
        }
    }

    // Scores as high and low terms. own: the fragment's own steps, which get the causal mask.
    KGEN_DEVICE void split_scores(typename Half::A& hi, typename Half::A& lo,
                                  const float (&parts)[2][2][4], bool own) const {
        const MmaLane lane = mma_lane();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float two[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int of = i % 2 * 2 + j;
                two[j] = parts[0][i / 2][of] + parts[1][i / 2][of];
                if constexpr (Scaled) two[j] *= rows_.value_factor;
                if (own && 8 * (i / 2) + 2 * lane.q + j > lane.g + 8 * (i % 2)) two[j] = 0.0f;
            }
            hi.pair[i] = pack2<T>(two[0], two[1]);
            const f32x2 back = unpack2<T>(hi.pair[i]);
            lo.pair[i] = pack2<T>(two[0] - back.x, two[1] - back.y);
        }
    }

    static KGEN_DEVICE int value_of(int i) { return i / 4 * 8 + 2 * mma_lane().q + i % 2; }

    KGEN_DEVICE void write_quads(const float (&sums)[2 * kPairs][4], i64 first, int step,
                                 int left) const {
        Vec<u32, 2> quads[kPairs][2];
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                quads[n][half] = quad_of_row<T>(sums[2 * n], sums[2 * n + 1], half);
        const int column = column_of_quad();
        T* row = rows_.out.at(first + step) + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (step + 8 * half >= left) break;
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
                if (Values % BlockV == 0 || 16 * n + column < rows_.values)
                    *reinterpret_cast<Vec<u32, 2>*>(row + 8 * half * rows_.out.stride + 16 * n) =
                        quads[n][half];
        }
    }

    const RecurrenceRows<T>& rows_;
    int tile_;
    typename Half::A a_[StepTiles][kSteps];
    float sums_[StepTiles][2 * kPairs][4] = {};
};

// Which of `count` units of work a warp takes, where unit i + 1 is a little more work than unit i. Every fourth warp is
// on the same scheduler of an SM; `turned` reverses the order among four, so that each scheduler gets long and short
// units.
KGEN_DEVICE int balanced_unit(int warp, int count, bool turned) {
    const int first = warp / 4 * 4, last = min(first + 4, count) - 1;
    return turned ? first + last - warp : warp;
}

// Whether any thread of the CTA passes a value other than zero (NaN). Contains a block barrier.
template <int Warps>
KGEN_DEVICE bool block_any_nonfinite(float nonfinite) {
    __shared__ int flags[Warps];
    const bool of_warp = any(!(nonfinite == 0.0f));
    if (lane_id() == 0) flags[thread_rank() / kWarpSize] = of_warp ? 1 : 0;
    sync_block();
    bool found = false;
#pragma unroll
    for (int i = 0; i < Warps; ++i) found = found || flags[i] != 0;
    return found;
}

// Scales and writes the rows of a fragment of 16 steps that begins at step `first`; `left` of them exist. sums: tiles
// of 8 value features. Returns NaN if any output is not finite.
template <class T, int Values, int BlockV>
KGEN_DEVICE float write_fragment(float (&sums)[BlockV / 8][4], const RecurrenceRows<T>& rows, i64 first,
                                 int left) {
    constexpr int kPairs = BlockV / 16;
    float nonfinite[4] = {};  // independent chains of fma, to hide their latency
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[n][i] *= rows.out_factor;
            nonfinite[i] = fma(sums[n][i], 0.0f, nonfinite[i]);
        }
    const MmaLane lane = mma_lane();
    if constexpr (Values % 4 == 0) {
        Vec<u32, 2> quads[2][kPairs];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
                quads[half][n] = quad_of_row<T>(sums[2 * n], sums[2 * n + 1], half);
        const int column = column_of_quad();
        T* row = rows.out.at(first + lane.g) + column;
        const i64 below = 8 * rows.out.stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (lane.g + 8 * half >= left) break;
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
                if (Values % BlockV == 0 || 16 * n + column < rows.values)
                    *reinterpret_cast<Vec<u32, 2>*>(row + half * below + 16 * n) = quads[half][n];
        }
    } else {
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int step = lane.g + i / 2 * 8, value = 8 * n + 2 * lane.q + i % 2;
                if (step < left && value < rows.values)
                    rows.out.at(first + step)[value] = from_float<T>(sums[n][i]);
            }
    }
    return nonfinite[0] + nonfinite[1] + (nonfinite[2] + nonfinite[3]);
}

}  // namespace kgen
