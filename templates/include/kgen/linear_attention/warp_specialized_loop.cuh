// warp_specialized: a linear recurrence over the steps of one head by producer and consumer warps (mma, sm_80).
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// A CTA loops over batches of kBatch steps. Producer warps keep tiles of the state in registers, store the state
// before each chunk of a batch in shared memory, and add the chunk's b^T v (StateFragments in chunk_states.cuh).
// Meanwhile consumer warps compute the outputs of the previous batch, 16 steps per warp (chunk_attention.cuh).
//
// No warp waits for scores of another warp, and only the sum of states is serial. In chunk_loop.cuh every warp does
// all products of some value features; that loop also has decays, key sums, TF32 and fp16.
//
// Layout: rows in shared memory are kKeyStride and kValueStride elements apart (chunk_row_stride). Rows of a are
// needed a batch later than b and v, so their ring has one stage less.
//
// Shared memory: T ring[Stages][b: kBatch x kKeyStride; v: kBatch x kValueStride], a[Stages - 1][kBatch x
// kKeyStride], state before each chunk of two batches [2][Chunks][kKeys][kValueStride].
//
// Synchronisation: one cp.async group and one block barrier per batch. Between two barriers producers write the
// states of batch n and consumers read those of batch n - 1.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/step_by_step.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/chunked/chunk_states.cuh"

namespace kgen {

// Keys, Values: features of a and b, and of v and out; BlockV: value features of a CTA. Chunk: steps with scores
// between them; Chunks: chunks of a batch, which has a consumer warp for every 16 steps; KeyWarps, ValueWarps: producer
// warps along the features; Stages: batches in shared memory; CopyBytes: bytes of one cp.async.
template <class T, int Keys, int Values, int BlockV, int Chunk, int Chunks, int KeyWarps,
          int ValueWarps, int Stages, int CopyBytes>
class WarpSpecializedLoop {
    static constexpr int kKeys = whole_fragments(Keys);
    static constexpr int kBatch = Chunk * Chunks;
    static constexpr int kConsumerWarps = kBatch / 16, kTilesPerChunk = Chunk / 16;
    static constexpr int kWarps = kConsumerWarps + KeyWarps * ValueWarps;
    using Rows = ChunkAttention<T, Keys, Values, BlockV, 1, false>;
    using Tile = StateFragments<T, kKeys / (16 * KeyWarps), BlockV / (16 * ValueWarps), Chunk>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;

    static constexpr int kKeyRows = kBatch * kKeyStride;
    static constexpr int kStage = kKeyRows + kBatch * kValueStride;  // of b and v
    static constexpr int kRing = Stages * kStage + (Stages - 1) * kKeyRows;
    static constexpr int kState = kKeys * kValueStride;

    static_assert(kKeys % (16 * KeyWarps) == 0 && BlockV % (16 * ValueWarps) == 0,
                  "a producer warp has whole fragments of the state, pairs of tiles of 8 values");
    static_assert(Chunk % 16 == 0, "a chunk is whole fragments");
    static_assert(Stages >= 3, "two batches are in use while others are being copied");
    static_assert(kWarps <= 32, "a CTA has at most 32 warps");

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kValueBlocks = (Values + BlockV - 1) / BlockV;
    static constexpr int kSmemBytes = max((kRing + 2 * Chunks * kState) *
                                              static_cast<int>(sizeof(T)),
                                          step_by_step_bytes(Keys, BlockV));

    // rows, states: v, out and the states begin with the CTA's first value feature.
    KGEN_DEVICE WarpSpecializedLoop(const RecurrenceRows<T>& rows, const RecurrenceStates& states)
        : rows_(rows),
          states_(states),
          copy_a_(rows.a, rows.first, Keys),
          copy_b_(rows.b, rows.first, Keys),
          copy_v_(rows.v, rows.first, rows.values) {
        ring_ = dynamic_smem<T>();
        ring_a_ = ring_ + Stages * kStage;
        state_ring_ = ring_ + kRing;
        const i64 steps = rows.end - rows.first;
        full_batches_ = static_cast<int>(steps / kBatch);
        last_steps_ = static_cast<int>(steps % kBatch);
        batches_ = full_batches_ + (last_steps_ > 0 ? 1 : 0);
        const int warp = thread_rank() / kWarpSize;
        is_producer_ = warp >= kConsumerWarps;
        const int producer = warp - kConsumerWarps;
        key0_ = producer / ValueWarps * (kKeys / KeyWarps);
        value0_ = producer % ValueWarps * (BlockV / ValueWarps);
        const int unit = balanced_unit(warp, kConsumerWarps, warp / 4 % 2 != 0);
        chunk_ = unit / kTilesPerChunk;
        tile_ = unit % kTilesPerChunk;
    }

    KGEN_DEVICE void run() {
        if (kKeys > Keys || rows_.values < BlockV) {  // padding features are zeros
            for (int i = thread_rank(); i < kRing; i += kThreads)
                ring_[i] = from_float<T>(0.0f);
            sync_block();
        }
        Tile state;
        if (is_producer_ && states_.initial_state != nullptr) load_initial_state(state);
#pragma unroll
        for (int batch = 0; batch < Stages - 2; ++batch) stage();
        float nonfinite = 0.0f;
#pragma unroll 1
        for (int batch = 0; batch <= batches_; ++batch) {
            cp_async_wait<Stages - 3>();
            sync_block();
            stage();
            if (is_producer_) {
                if (batch < batches_) add(state, batch);
            } else if (batch > 0) {
                nonfinite += write(batch - 1);
            }
        }
        cp_async_wait_all();
        if (is_producer_ && states_.final_state != nullptr) store_final_state(state);
        if (block_any_nonfinite<kWarps>(nonfinite))
            run_step_by_step<T, Keys, Values, BlockV, kThreads, false, false, false, true>(
                rows_, states_, NoDecayRows{});
    }

private:
    // Starts the copies of the next batch of b and v, and of the rows of a of the batch before that.
    KGEN_DEVICE void stage() {
        if (staged_ < batches_) {
            T* tile = ring_ + staged_ % Stages * kStage;
            if (staged_ < full_batches_) {
                copy_b_.template start<true>(tile, kKeyStride, kBatch);
                copy_v_.template start<true>(tile + kKeyRows, kValueStride, kBatch);
            } else {
                copy_b_.template start<false>(tile, kKeyStride, last_steps_);
                copy_v_.template start<false>(tile + kKeyRows, kValueStride, last_steps_);
            }
        }
        if (staged_ > 0 && staged_ <= batches_) {
            T* tile = ring_a_ + (staged_ - 1) % (Stages - 1) * kKeyRows;
            if (staged_ <= full_batches_) {
                copy_a_.template start<true>(tile, kKeyStride, kBatch);
            } else {
                copy_a_.template start<false>(tile, kKeyStride, last_steps_);
            }
        }
        ++staged_;
        cp_async_commit();
    }

    // Rows of a chunk.
    KGEN_DEVICE const T* a_of(int batch, int chunk) const {
        return ring_a_ + batch % (Stages - 1) * kKeyRows + chunk * Chunk * kKeyStride;
    }
    KGEN_DEVICE const T* b_of(int batch, int chunk) const {
        return ring_ + batch % Stages * kStage + chunk * Chunk * kKeyStride;
    }
    KGEN_DEVICE const T* v_of(int batch, int chunk) const {
        return ring_ + batch % Stages * kStage + kKeyRows + chunk * Chunk * kValueStride;
    }

    KGEN_DEVICE T* state_before(int batch, int chunk) const {
        return state_ring_ + (batch % 2 * Chunks + chunk) * kState;
    }

    // Called by a producer warp: stores its state tile before each chunk of the batch, then adds the chunk.
    KGEN_DEVICE void add(Tile& state, int batch) const {
#pragma unroll 1
        for (int chunk = 0; chunk < Chunks; ++chunk) {
            state.store(
                state_before(batch, chunk) + key0_ * kValueStride + value0_, kValueStride,
                [&](int m, int n, int i) { return state.at(m, n, i); },
                [](int, int) { return true; });
            state.add(b_of(batch, chunk) + key0_, kKeyStride, v_of(batch, chunk) + value0_,
                      kValueStride);
        }
    }

    // Called by a consumer warp: computes and writes the outputs of its 16 steps. Returns NaN if any is not finite.
    KGEN_DEVICE float write(int batch) const {
        const int left = (batch < full_batches_ ? kBatch : last_steps_) - chunk_ * Chunk;
        if (left <= 16 * tile_) return 0.0f;
        Rows outputs(rows_, tile_);
        outputs.read(a_of(batch, chunk_));
        outputs.template carry<false>(state_before(batch, chunk_));
        outputs.intra_chunk(b_of(batch, chunk_), v_of(batch, chunk_));
        return outputs.write(rows_.first + static_cast<i64>(batch) * kBatch + chunk_ * Chunk, left,
                             states_.bias);
    }

    KGEN_DEVICE void load_initial_state(Tile& state) const {
        Tile::for_all([&](int m, int n, int i, int of_key, int of_value) {
            const int key = key0_ + of_key, value = value0_ + of_value;
            if (key < Keys && value < rows_.values)
                state.set(m, n, i, states_.template initial_at<false>(key, value, Keys, Values));
        });
    }

    KGEN_DEVICE void store_final_state(const Tile& state) const {
        Tile::for_all([&](int m, int n, int i, int of_key, int of_value) {
            const int key = key0_ + of_key, value = value0_ + of_value;
            if (key < Keys && value < rows_.values)
                states_.store_final(key, value, state.at(m, n, i) * states_.final_factor);
        });
    }

    template <int Width, int Rows>
    using Copier = ChunkCopier<T, Rows, Width, CopyBytes, kThreads>;

    const RecurrenceRows<T>& rows_;
    const RecurrenceStates& states_;
    Copier<Keys, kBatch> copy_a_, copy_b_;
    Copier<BlockV, kBatch> copy_v_;
    T *ring_, *ring_a_, *state_ring_;
    int batches_, full_batches_;  // all batches, and those with kBatch steps
    int last_steps_;              // steps of a partial last batch, or 0
    bool is_producer_;
    int key0_, value0_;           // a producer's first features of the state
    int chunk_, tile_;            // a consumer's 16 steps of a batch
    int staged_ = 0;
};

}  // namespace kgen
