// Checkpoints of the state, or of its gradient, at the ends of chunks: first kernel of wkv5's and wkv6's backward pass
// on tensor cores.
//
//     forward     S_t     = diag(d_t) S_{t-1} + k_t v_t^T          written before each chunk
//     backward    G_{t-1} = diag(d_t) G_t + scale * r_t gy_t^T     written after each chunk
//
// 16 steps are one product: rows of keys are multiplied by running products of decays, up to the last of the steps
// (forward) or from the first one (backward), so that no factor exceeds 1.
//
// Layout: a block has BlockV value features of a head; each warp has 16 keys of them in registers (StateTile).
//
// Shared memory: W w[kStages][32][kKeys], if w has steps; T x[kStages][32][kKeys], rows[kStages][32][kRowStride];
// float factors[2][kFactors], decays[2][kKeys].
//
// Synchronisation: cp.async, kStages - 1 buffers of 32 steps ahead, with one block barrier per buffer. Factors and
// decays belong to a warp's own keys: a warp barrier precedes their reads, and another one the next writes.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/wkv/backward_config.cuh"
#include "kgen/wkv/state_tile.cuh"

namespace kgen::wkv {

// The element type of a checkpoint in memory: fp32, or pairs of bf16.
template <bool Rounded>
struct CheckpointWord {
    using Type = float;
};
template <>
struct CheckpointWord<true> {
    using Type = u32;
};

// One block's loop over all steps of a head, for BlockV value features. Rounded: stores the states before every 16
// steps, in bf16, instead of those at the ends of chunks.
template <class C, bool Rounded = false>
class StateLoop {
    using Checkpoint = typename CheckpointWord<Rounded>::Type;
    using T = typename C::T;
    using W = typename C::W;
    using Tile = StateTile<T, C::kPrecise, C::kBlockV / 8>;
    static constexpr int kSteps = 32;  // per buffer: lanes have 16 keys of two sets of 16 steps
    static constexpr int kStages = C::kStages, kKeys = C::kKeys, kThreads = C::kThreads;
    static constexpr int kRowStride = chunk_row_stride<T>(C::kBlockV);
    static constexpr int kRows = kSteps * kRowStride, kBufferKeys = kSteps * kKeys;
    static constexpr int kStride = key_row_stride(kKeys), kFactors = key_rows(kStride);
    static constexpr int kPerChunk = C::kChunk / kSteps;

public:
    static constexpr int kSmemBytes =
        kStages * ((kRows + kBufferKeys) * static_cast<int>(sizeof(T)) +
                   (C::kPerStep ? kBufferKeys * static_cast<int>(sizeof(W)) : 0)) +
        4 * (2 * kFactors + 2 * kKeys);

    StepRows<const T> x;     // rows of keys: k, or r
    StepRows<const T> rows;  // rows of values, from the block's first value on: v, or gy
    StepRows<const W> w;
    i64 steps;
    int width;    // value features of the block that exist
    float scale;  // factor of x

    // start and end: the head's [K, V], from the block's first key and value on, or null. checkpoints: this warp's tile
    // of the head's first chunk, of which the block has `block_tiles` fragments; the tiles of chunks are
    // `checkpoint_stride` words apart.
    template <bool Backward>
    KGEN_DEVICE void run(const float* start, Checkpoint* checkpoints, i64 checkpoint_stride,
                         int block_tiles, float* end) const {
        const auto load = [&](Tile& state, int key0) {
            state.clear();
            if (start != nullptr)
                state.load_rows(start + static_cast<i64>(key0) * C::kHeadValues, C::kHeadValues,
                                C::kK - key0, width);
        };
        run_from<Backward>(load, checkpoints, checkpoint_stride, block_tiles, end);
    }

    // The same, from the state that load(tile, its first key) sets.
    template <bool Backward, class Load>
    KGEN_DEVICE void run_from(const Load& load, Checkpoint* checkpoints, i64 checkpoint_stride,
                              int block_tiles, float* end) const {
        // Shared memory: W w[Stages][32][kKeys]; T x[Stages][32][kKeys],
        // rows[Stages][32][kRowStride]; float factors[2][kFactors], decays[2][kKeys].
        W* ring_w = dynamic_smem<W>();
        T* ring_x = reinterpret_cast<T*>(ring_w + (C::kPerStep ? kStages * kBufferKeys : 0));
        T* ring_rows = ring_x + kStages * kBufferKeys;
        float* factors = reinterpret_cast<float*>(ring_rows + kStages * kRows);
        float* decays = factors + 2 * kFactors;

        const int key0 = thread_rank() / kWarpSize * 16;
        Tile state;
        load(state, key0);
        if (kKeys > C::kK || width < C::kBlockV) {  // padding that no copy writes stays zero
            if constexpr (C::kPerStep)
                for (int i = thread_rank(); i < kStages * kBufferKeys; i += kThreads)
                    ring_w[i] = from_float<W>(0.0f);
            for (int i = thread_rank(); i < kStages * (kBufferKeys + kRows); i += kThreads)
                ring_x[i] = from_float<T>(0.0f);
            sync_block();
        }
        // The decay of this lane's key, if w has no steps.
        const int key = key0 + lane_id() % 16;
        float constant = 1.0f;
        if constexpr (!C::kPerStep)
            if (key < C::kK) constant = decay_of<C::kForm>(to_float(w.at(0)[key]));

        const i64 buffers = ceil_div(steps, i64{kSteps});
        const auto stage = [&](i64 buffer) {
            if (buffer < buffers) {
                const i64 first = (Backward ? buffers - 1 - buffer : buffer) * kSteps;
                const int slot = static_cast<int>(buffer % kStages);
                const int left = static_cast<int>(min(steps - first, i64{kSteps}));
                copy_rows<T, kSteps, C::kK, C::kCopyBytes, kThreads>(
                    ring_x + slot * kBufferKeys, kKeys, x, first, left);
                copy_rows<T, kSteps, C::kBlockV, C::kCopyBytes, kThreads>(
                    ring_rows + slot * kRows, kRowStride, rows, first, left, width);
                if constexpr (C::kPerStep)
                    copy_rows<W, kSteps, C::kK, C::kCopyBytesW, kThreads>(
                        ring_w + slot * kBufferKeys, kKeys, w, first, left);
            }
            cp_async_commit();
        };
        for (int buffer = 0; buffer < kStages - 1; ++buffer) stage(buffer);

#pragma unroll 1
        for (i64 buffer = 0; buffer < buffers; ++buffer) {
            cp_async_wait<kStages - 2>();
            sync_block();
            stage(buffer + kStages - 1);
            const int slot = static_cast<int>(buffer % kStages);
            const i64 time = Backward ? buffers - 1 - buffer : buffer;
            const bool boundary =
                Backward ? (time + 1) % kPerChunk == 0 || buffer == 0 : time % kPerChunk == 0;
            if constexpr (Rounded) {
                static_assert(!Backward, "gradients of the state are not rounded");
            } else {
                if (boundary) state.store_fragments(checkpoints + time / kPerChunk * checkpoint_stride,
                                          block_tiles);
                if (!Backward && time / kPerChunk == (buffers - 1) / kPerChunk) break;
            }

            // 1. Rows of keys times decays: each lane has a key of its warp and 16 of the steps.
            {
                const int half = lane_id() / 16;
                const T* from = ring_x + slot * kBufferKeys + half * kSubSteps * kKeys + key;
                const W* decays_of = ring_w + slot * kBufferKeys + half * kSubSteps * kKeys + key;
                const i64 first = time * kSteps + half * kSubSteps;
                float* to = factors + half * kFactors + key;
                CompensatedProduct product(scale);
                float all = 1.0f;
#pragma unroll
                for (int i = 0; i < kSubSteps; ++i) {
                    const int step = Backward ? i : kSubSteps - 1 - i;
                    float decay = constant;
                    if constexpr (C::kPerStep) {
                        // untested: nothing needs the state after a last chunk that is not whole
                        decay = C::decay_of_step(decays_of[step * kKeys], first + step < steps);
                    } else if (first + step >= steps) {  // untested: as above
                        decay = 1.0f;
                    }
                    to[step * kStride] = product.times(to_float(from[step * kKeys]));
                    product.multiply(decay);
                    all *= decay;
                }
                decays[half * kKeys + key] = all;
            }
            sync_warp();

            // 2. The state is updated by two sets of 16 steps.
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int half = Backward ? 1 - i : i;
                if constexpr (Rounded)
                    if (time * kSteps + half * kSubSteps < steps)
                        state.store_rounded(checkpoints + (2 * time + half) * checkpoint_stride, block_tiles);
                state.update(state, decays + half * kKeys + key0,
                              factors + half * kFactors + key0, kStride,
                              ring_rows + slot * kRows + half * kSubSteps * kRowStride, kRowStride);
            }
            sync_warp();
        }
        cp_async_wait_all();
        if (end != nullptr)
            state.store_rows(end + static_cast<i64>(key0) * C::kHeadValues, C::kHeadValues,
                             C::kK - key0, width);
    }
};

}  // namespace kgen::wkv
