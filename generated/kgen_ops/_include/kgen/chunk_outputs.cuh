// Outputs of one chunk of a linear recurrence from the state before it.
//
//     out_t = factor * (a_t S + sum over s <= t of (a_t b_s) v_s)
//
// As attention without softmax: a warp has 16 or 32 steps of a, and with them rows of the outputs. It
// reads the state once, and then b and v of its steps and of those before, 16 at a time; what is a sum
// for one product is an operand of the next as it lies in registers. So once everything has been copied
// warps wait for nothing, and no state is updated: for that see state_walk.cuh, which leaves it.
//
// A block may begin while the states are still made (dependent_launch.cuh): then it makes first what
// needs no state. One that begins later has the state to copy at once, and goes through it first.
//
// Scores are high and low parts, as in chunk_mma.cuh, where it says why; NaN and Inf are noticed as in
// chunk_walk.cuh, by their effect, and then all is done again step by step.
#pragma once

#include "block.cuh"
#include "chunk_mma.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_stage.cuh"
#include "dependent_launch.cuh"
#include "math.cuh"
#include "state_walk.cuh"

namespace kgen {

// The state before a chunk, as state_walk.cuh leaves it, from the slice's first value on.
template <class T>
struct StoredState : WalkStates {
    const T* stored;     // or null: zeros
    i64 row_stride;
    bool transposed;     // a row is a value feature's, not a key feature's

    template <bool>
    KGEN_DEVICE float first(int key, int value, int, int) const {
        if (stored == nullptr) return 0.0f;
        return to_float(transposed ? stored[value * row_stride + key]
                                   : stored[key * row_stride + value]);
    }
};

// Keys, Values: features of a and b, and of v and out; Slice: value features of a block; StepTiles:
// fragments of 16 steps of a warp, for which it reads b, v and the state once; CopyBytes: of one copy of
// a, b and v. Scaled: scores are multiplied by rows.value_factor. Early: so many blocks per SM, those
// that the GPU begins first, begin while the states are made; 0: the kernel begins behind them.
template <class T, int Keys, int Values, int Chunk, int Slice, int StepTiles, int CopyBytes,
          bool Scaled, int Early>
class ChunkOutputs {
    static constexpr int kWarps = Chunk / (16 * StepTiles);
    static constexpr int kKeys = whole_fragments(Keys);
    static constexpr int kSteps = kKeys / 16;   // of sums over keys
    static constexpr int kPairs = Slice / 16;   // of tiles of 8 values
    static constexpr int kHeld = kPairs % 2 == 0 ? 2 : 1;  // pairs whose operands B are held at once
    static constexpr int kKeyStride = chunk_row_stride<T>(kKeys);
    static constexpr int kValueStride = chunk_row_stride<T>(Slice);
    static constexpr int kState = max(kKeys * kValueStride, Slice * kKeyStride);
    static constexpr int kElements = Chunk * (2 * kKeyStride + kValueStride) + kState;
    using Half = HalfOperands<T>;
    using Sums = float[StepTiles][2 * kPairs][4];
    using Rows = typename Half::A[StepTiles][kSteps];

    static_assert(sizeof(T) == 2 && Chunk % (16 * StepTiles) == 0 && Slice % 16 == 0,
                  "whole fragments of 16 bits");

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kSlices = (Values + Slice - 1) / Slice;
    static constexpr int kSmemBytes =
        max(kElements * static_cast<int>(sizeof(T)), plain_walk_bytes(Keys, Slice));

    // Of v, out and the state the slice's features alone.
    KGEN_DEVICE ChunkOutputs(const WalkRows<T>& rows, const StoredState<T>& state)
        : rows_(rows), state_rows_(state) {
        // Shared memory: T a, b[Chunk][kKeyStride], v[Chunk][kValueStride], and the state:
        // [kKeys][kValueStride], or transposed [Slice][kKeyStride].
        a_ = dynamic_smem<T>();
        b_ = a_ + Chunk * kKeyStride;
        v_ = b_ + Chunk * kKeyStride;
        state_ = v_ + Chunk * kValueStride;
        left_ = static_cast<int>(rows.end - rows.first);
        // A scheduler's warps have long and short sums: every other four of them are turned around, and
        // so are those of the blocks that share an SM, which are about as many apart as there are SMs.
        const int warp = thread_rank() / kWarpSize;
        const bool turned = kWarps > 4 ? warp % 8 >= 4 : blockIdx.x / 128 % 2 != 0;
        const int first = warp / 4 * 4, last = min(first + 4, kWarps) - 1;
        tile_ = StepTiles * (turned ? first + last - warp : warp);
    }

    KGEN_DEVICE void run() {
        bool early = false;
        if constexpr (Early > 0) {
            early = static_cast<int>(blockIdx.x) < Early * multiprocessors();
            if (!early) wait_for_earlier_kernel(state_rows_.stored);
        }
        stage(!early);
        Sums sums = {};
        cp_async_wait<1>();
        sync_block();
        Rows a;
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int m = 0; m < StepTiles; ++m)
                a[m][k] = Half::a_rows(a_ + 16 * (tile_ + m) * kKeyStride + 16 * k, kKeyStride);
        // What the steps read of the state, and of the steps before them and of themselves. A loop has
        // both orders without twice the code.
#pragma unroll 1
        for (int part = 0; part < (Early > 0 ? 2 : 1); ++part) {
            if (Early == 0 || (part == 0) != early) {
                if (early) {
                    wait_for_earlier_kernel(state_rows_.stored);
                    copy_state();
                    cp_async_wait_all();
                    sync_block();
                }
                see_state(sums, a);
            }
            if (Early == 0 || (part == 0) == early) {
                cp_async_wait_all();
                sync_block();
                see_steps(sums, a);
            }
        }
        if (block_has(write(sums)))
            walk_plainly<T, Keys, Values, Slice, kThreads, false, false, Scaled, true>(
                rows_, state_rows_, NoDecayRows{});
    }

private:
    // Start all copies: a and, if it is there, the state; then b and v.
    KGEN_DEVICE void stage(bool with_state) {
        const bool ragged = kKeys > Keys || rows_.values < Slice;
        if (ragged) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < kElements; i += kThreads) a_[i] = from_float<T>(0.0f);
            sync_block();
        }
        copy<Keys>(a_, kKeyStride, rows_.a, Keys);
        if (with_state) copy_state();
        cp_async_commit();
        copy<Keys>(b_, kKeyStride, rows_.b, Keys);
        copy<Slice>(v_, kValueStride, rows_.v, rows_.values);
        cp_async_commit();
    }

    KGEN_DEVICE void copy_state() const {
        if (state_rows_.stored == nullptr) return;
        const StepRows<const T> source{state_rows_.stored, state_rows_.row_stride};
        const int values = min(whole_fragments(rows_.values), Slice);
        if (state_rows_.transposed) {
            ChunkCopier<T, Slice, kKeys, 16, kThreads>(source, 0, kKeys)
                .template start<false>(state_, kKeyStride, values);
        } else {
            ChunkCopier<T, kKeys, Slice, 16, kThreads>(source, 0, values)
                .template start<true>(state_, kValueStride, kKeys);
        }
    }

    template <int Width>
    KGEN_DEVICE void copy(T* tile, int stride, const StepRows<const T>& from, int width) const {
        ChunkCopier<T, Chunk, Width, CopyBytes, kThreads> copier(from, rows_.first, width);
        if (left_ >= Chunk) {
            copier.template start<true>(tile, stride, Chunk);
        } else {
            copier.template start<false>(tile, stride, left_);
        }
    }

    KGEN_DEVICE void see_state(Sums& sums, const Rows& a) const {
        if (state_rows_.stored == nullptr) return;
        if (state_rows_.transposed) {
            carry<true>(sums, a);
        } else {
            carry<false>(sums, a);
        }
    }

    KGEN_DEVICE void see_steps(Sums& sums, const Rows& a) const {
        if (16 * tile_ >= left_) return;
#pragma unroll 1
        for (int tile = 0; tile < tile_; ++tile) look<-1>(sums, a, tile);
        look<0>(sums, a, tile_);
        if constexpr (StepTiles > 1) look<1>(sums, a, tile_ + 1);
    }

    // O += A S.
    template <bool Transposed>
    KGEN_DEVICE void carry(Sums& sums, const Rows& a) const {
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int n = 0; n < kPairs; ++n) {
                typename Half::B two[2];
                if constexpr (Transposed) {
                    Half::two_rows(two, state_ + 16 * n * kKeyStride + 16 * k, kKeyStride);
                } else {
                    Half::two_columns(two, state_ + 16 * k * kValueStride + 16 * n, kValueStride);
                }
#pragma unroll
                for (int m = 0; m < StepTiles; ++m)
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        Half::template multiply<0>(sums[m][2 * n + i], a[m][k], two[i]);
            }
    }

    // O += (A B^T) V over the 16 steps of `tile`. Own: which of the warp's fragments they are, which
    // sees them up to each step, and those before it not at all; or -1, all are later.
    template <int Own>
    KGEN_DEVICE void look(Sums& sums, const Rows& a, int tile) const {
        constexpr int kFirst = max(Own, 0);
        // Two sums each, for chains of products that do not wait for each other.
        float parts[StepTiles][2][2][4] = {};
        const T* b = b_ + 16 * tile * kKeyStride;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            typename Half::B two[2];
            Half::two_rows(two, b + 16 * k, kKeyStride);
#pragma unroll
            for (int m = kFirst; m < StepTiles; ++m)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    Half::template multiply<0>(parts[m][k % 2][i], a[m][k], two[i]);
        }
        typename Half::A hi[StepTiles], lo[StepTiles];
#pragma unroll
        for (int m = kFirst; m < StepTiles; ++m) split_scores(hi[m], lo[m], parts[m], m == Own);
        const T* v = v_ + 16 * tile * kValueStride;
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
                        Half::template multiply<0>(sums[m][2 * n + i], pass == 0 ? lo[m] : hi[m],
                                                   two[i / 2][i % 2]);
        }
    }

    // Scores as high and low parts; of a fragment's own steps those beyond the diagonal are zeros.
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

    // Scale and write; what is not finite makes the result NaN.
    KGEN_DEVICE float write(Sums& sums) const {
        float poison = 0.0f;
#pragma unroll
        for (int m = 0; m < StepTiles; ++m) {
            const int step = 16 * (tile_ + m) + mma_lane().g;
#pragma unroll
            for (int i = 0; i < 8 * kPairs; ++i) {
                float& sum = sums[m][i / 4][i % 4];
                sum *= rows_.out_factor;
                if (state_rows_.bias != nullptr && value_of(i) < rows_.values)
                    sum += state_rows_.bias[value_of(i)];
                poison = fma(sum, 0.0f, poison);
            }
            if constexpr (Values % 4 == 0) {
                write_quads(sums[m], step);
            } else {
#pragma unroll
                for (int i = 0; i < 8 * kPairs; ++i) {
                    const int t = step + i % 4 / 2 * 8;
                    if (t < left_ && value_of(i) < rows_.values)
                        rows_.out.at(rows_.first + t)[value_of(i)] =
                            from_float<T>(sums[m][i / 4][i % 4]);
                }
            }
        }
        return poison;
    }

    static KGEN_DEVICE int value_of(int i) { return i / 4 * 8 + 2 * mma_lane().q + i % 2; }

    KGEN_DEVICE void write_quads(const float (&sums)[2 * kPairs][4], int step) const {
        Vec<u32, 2> quads[kPairs][2];
#pragma unroll
        for (int n = 0; n < kPairs; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                quads[n][half] = quad_of_row<T>(sums[2 * n], sums[2 * n + 1], half);
        const int column = column_of_quad();
        T* row = rows_.out.at(rows_.first + step) + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (step + 8 * half >= left_) break;
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
                if (Values % Slice == 0 || 16 * n + column < rows_.values)
                    *reinterpret_cast<Vec<u32, 2>*>(row + 8 * half * rows_.out.stride + 16 * n) =
                        quads[n][half];
        }
    }

    // Whether any thread's is not zero.
    static KGEN_DEVICE bool block_has(float poison) {
        __shared__ int flags[kWarps];
        const bool of_warp = any(!(poison == 0.0f));
        if (lane_id() == 0) flags[thread_rank() / kWarpSize] = of_warp ? 1 : 0;
        sync_block();
        bool found = false;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) found = found || flags[i] != 0;
        return found;
    }

    const WalkRows<T>& rows_;
    StoredState<T> state_rows_;
    T *a_, *b_, *v_, *state_;
    int left_, tile_;  // steps of the chunk that exist, the warp's first 16 among them
};

}  // namespace kgen
