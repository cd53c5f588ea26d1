// Outputs of one chunk of a linear recurrence from the state before it: a block's part of them.
//
// A warp has rows of the outputs (chunk_rows.cuh). Once everything has been copied warps wait for
// nothing, and no state is updated: for that see state_walk.cuh, which leaves it. What is not finite
// is noticed by its effect, and then all is done again step by step.
//
// A block may begin while the states are still made (dependent_launch.cuh): then it makes first what
// needs no state. One that begins later has the state to copy at once, and goes through it first.
#pragma once

#include "block.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_rows.cuh"
#include "chunk_stage.cuh"
#include "dependent_launch.cuh"
#include "math.cuh"
#include "multiprocessors.cuh"

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
    using Rows = ChunkRows<T, Keys, Values, Slice, StepTiles, Scaled>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    static constexpr int kState = max(kKeys * kValueStride, Slice * kKeyStride);
    static constexpr int kElements = Chunk * (2 * kKeyStride + kValueStride) + kState;

    static_assert(Chunk % (16 * StepTiles) == 0, "whole fragments");

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
        // Blocks that share an SM are about as many apart as there are SMs.
        const int warp = thread_rank() / kWarpSize;
        const bool turned = kWarps > 4 ? warp % 8 >= 4 : blockIdx.x / 128 % 2 != 0;
        tile_ = StepTiles * balanced_unit(warp, kWarps, turned);
    }

    KGEN_DEVICE void run() {
        bool early = false;
        if constexpr (Early > 0) {
            early = static_cast<int>(blockIdx.x) < Early * multiprocessors();
            if (!early) wait_for_earlier_kernel(state_rows_.stored);
        }
        stage(!early);
        Rows outputs(rows_, tile_);
        cp_async_wait<1>();
        sync_block();
        outputs.read(a_);
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
                carry(outputs);
            }
            if (Early == 0 || (part == 0) == early) {
                cp_async_wait_all();
                sync_block();
                if (16 * tile_ < left_) outputs.look_back(b_, v_);
            }
        }
        if (block_has<kWarps>(outputs.write(rows_.first, left_, state_rows_.bias)))
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

    KGEN_DEVICE void carry(Rows& outputs) const {
        if (state_rows_.stored == nullptr) return;
        if (state_rows_.transposed) {
            outputs.template carry<true>(state_);
        } else {
            outputs.template carry<false>(state_);
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

    const WalkRows<T>& rows_;
    StoredState<T> state_rows_;
    T *a_, *b_, *v_, *state_;
    int left_, tile_;  // steps of the chunk that exist, the warp's first 16 among them
};

}  // namespace kgen
