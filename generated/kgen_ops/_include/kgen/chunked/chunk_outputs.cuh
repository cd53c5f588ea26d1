// chunk_parallel, second kernel: the outputs of one chunk from the state before it (a CTA's value features).
//
//     out_t = factor * (a_t S + sum over s <= t of the chunk of (a_t b_s) v_s)
//
// chunk_states.cuh has stored S. A warp computes 16 or 32 rows of the outputs (chunk_attention.cuh). If any output is
// NaN or infinite, the CTA computes the chunk again, step by step (step_by_step.cuh).
//
// Layout: rows in shared memory are kKeyStride and kValueStride elements apart (chunk_row_stride).
//
// Shared memory: T a, b[Chunk][kKeyStride], v[Chunk][kValueStride], and both terms of the state: [kKeys][kValueStride],
// or transposed [BlockV][kKeyStride].
//
// Synchronisation: two cp.async groups (a and the state; b and v), each followed by a block barrier. With programmatic
// dependent launch (pdl.cuh) a CTA may start while the first kernel still computes states: it computes the part
// that needs no state first and then waits. A CTA that starts later copies the state at once and uses it first.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/step_by_step.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/sm.cuh"

namespace kgen {

// The state before a chunk, as chunk_states.cuh stores it, from the CTA's first value feature on.
template <class T>
struct StateBeforeChunk : RecurrenceStates {
    const T* stored;     // or null: zeros
    i64 low_terms;       // elements from a high term to its low one
    i64 row_stride;
    bool transposed;     // a row belongs to a value feature, not to a key

    template <bool>
    KGEN_DEVICE float initial_at(int key, int value, int, int) const {
        if (stored == nullptr) return 0.0f;
        const T* high = stored + (transposed ? value * row_stride + key : key * row_stride + value);
        return to_float(high[0]) + to_float(high[low_terms]);
    }
};

// Keys, Values: features of a and b, and of v and out; BlockV: value features of a CTA; StepTiles: fragments of 16
// steps of a warp, for which it reads b, v and the state once; CopyBytes: bytes of one cp.async of a, b and v.
// Scaled: scores are multiplied by rows.value_factor. Early: how many CTAs per SM, the first in launch order, start
// beside the first kernel; 0: without programmatic dependent launch.
template <class T, int Keys, int Values, int Chunk, int BlockV, int StepTiles, int CopyBytes,
          bool Scaled, int Early>
class ChunkOutputs {
    static constexpr int kWarps = Chunk / (16 * StepTiles);
    static constexpr int kKeys = whole_fragments(Keys);
    using Rows = ChunkAttention<T, Keys, Values, BlockV, StepTiles, Scaled>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    static constexpr int kState = max(kKeys * kValueStride, BlockV * kKeyStride);
    static constexpr int kElements = Chunk * (2 * kKeyStride + kValueStride) + 2 * kState;

    static_assert(Chunk % (16 * StepTiles) == 0, "whole fragments");

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kValueBlocks = (Values + BlockV - 1) / BlockV;
    static constexpr int kSmemBytes =
        max(kElements * static_cast<int>(sizeof(T)), step_by_step_bytes(Keys, BlockV));

    // rows, state: v, out and the state begin with the CTA's first value feature.
    KGEN_DEVICE ChunkOutputs(const RecurrenceRows<T>& rows, const StateBeforeChunk<T>& state)
        : rows_(rows), state_rows_(state) {
        a_ = dynamic_smem<T>();
        b_ = a_ + Chunk * kKeyStride;
        v_ = b_ + Chunk * kKeyStride;
        state_ = v_ + Chunk * kValueStride;
        left_ = static_cast<int>(rows.end - rows.first);
        // CTAs of one SM have indices about sm_count apart.
        const int warp = thread_rank() / kWarpSize;
        const bool turned = kWarps > 4 ? warp % 8 >= 4 : blockIdx.x / 128 % 2 != 0;
        tile_ = StepTiles * balanced_unit(warp, kWarps, turned);
    }

    KGEN_DEVICE void run() {
        bool early = false;
        if constexpr (Early > 0) {
            early = static_cast<int>(blockIdx.x) < Early * sm_count();
            if (!early) griddepcontrol_wait(state_rows_.stored);
        }
        stage(!early);
        Rows outputs(rows_, tile_);
        cp_async_wait<1>();
        sync_block();
        outputs.read(a_);
        // The state's part and the chunk's own part. The loop allows both orders without instantiating them twice.
#pragma unroll 1
        for (int part = 0; part < (Early > 0 ? 2 : 1); ++part) {
            if (Early == 0 || (part == 0) != early) {
                if (early) {
                    griddepcontrol_wait(state_rows_.stored);
                    copy_state();
                    cp_async_wait_all();
                    sync_block();
                }
                carry(outputs);
            }
            if (Early == 0 || (part == 0) == early) {
                cp_async_wait_all();
                sync_block();
                if (16 * tile_ < left_) outputs.intra_chunk(b_, v_);
            }
        }
        if (block_any_nonfinite<kWarps>(outputs.write(rows_.first, left_, state_rows_.bias)))
            run_step_by_step<T, Keys, Values, BlockV, kThreads, false, false, Scaled, true>(
                rows_, state_rows_, NoDecayRows{});
    }

private:
    // Starts all copies: a and, if it is complete, the state; then b and v.
    KGEN_DEVICE void stage(bool with_state) {
        const bool ragged = kKeys > Keys || rows_.values < BlockV;
        if (ragged) {  // padding features are zeros
            for (int i = thread_rank(); i < kElements; i += kThreads) a_[i] = from_float<T>(0.0f);
            sync_block();
        }
        copy<Keys>(a_, kKeyStride, rows_.a, Keys);
        if (with_state) copy_state();
        cp_async_commit();
        copy<Keys>(b_, kKeyStride, rows_.b, Keys);
        copy<BlockV>(v_, kValueStride, rows_.v, rows_.values);
        cp_async_commit();
    }

    KGEN_DEVICE void copy_state() const {
        if (state_rows_.stored == nullptr) return;
        const int values = min(whole_fragments(rows_.values), BlockV);
#pragma unroll
        for (int term = 0; term < 2; ++term) {
            const StepRows<const T> source{state_rows_.stored + term * state_rows_.low_terms,
                                           state_rows_.row_stride};
            T* to = state_ + term * kState;
            if (state_rows_.transposed) {
                ChunkCopier<T, BlockV, kKeys, 16, kThreads>(source, 0, kKeys)
                    .template start<false>(to, kKeyStride, values);
            } else {
                ChunkCopier<T, kKeys, BlockV, 16, kThreads>(source, 0, values)
                    .template start<true>(to, kValueStride, kKeys);
            }
        }
    }

    KGEN_DEVICE void carry(Rows& outputs) const {
        if (state_rows_.stored == nullptr) return;
#pragma unroll
        for (int term = 1; term >= 0; --term) {  // the smaller one first
            const T* state = state_ + term * kState;
            if (state_rows_.transposed) {
                outputs.template carry<true>(state);
            } else {
                outputs.template carry<false>(state);
            }
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

    const RecurrenceRows<T>& rows_;
    StateBeforeChunk<T> state_rows_;
    T *a_, *b_, *v_, *state_;
    int left_, tile_;  // steps of the chunk that exist; the warp's first fragment of 16 of them
};

}  // namespace kgen
