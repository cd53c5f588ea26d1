// The chunk loop of chunk_loop.cuh with the decays of halving_decay.cuh, and one block barrier per chunk.
//
// Between two barriers a CTA computes the following parts of consecutive chunks, in any order:
//
//     chunk c - 1    O += P V, and writes the outputs
//     chunk c        the scores P; O = A' S; S = diag(all d) S + B'^T V
//     chunk c + 1    the rows with decays
//
// No warp waits for another one within a chunk, and a warp's chains of products, of multiplications and of copies hide
// each other's latency.
//
// Shared memory: that of chunk_loop.cuh; then Score scores[planes][Chunk][kScoreStride] of every other chunk.
//
// Synchronisation: one cp.async group and one block barrier per chunk. A slot of the ring is read in three intervals:
// one chunk ahead for decays, for its own chunk, and one chunk later for V. With one buffer, for heads of many keys, a
// second barrier precedes the rows with decays of the next chunk.
#pragma once

#include "kgen/chunked/chunk_loop.cuh"
#include "kgen/chunked/halving_decay.cuh"

namespace kgen {

// Parameters: see ChunkLoop. Returned: whether the final state is returned, so that the state is as accurate as fp32.
// Decay: HalvingRows, which says how many buffers rows with decays have.
template <class T, bool Returned, int Keys, int Values, int Chunk, int MTiles, int MWarps,
          int KeyWarps, int Stages, int CopyBytes, class Decay>
class HalvingLoop
    : public ChunkLoop<T, HalvingProducts<Returned, Decay::kPairs>, Keys, Values, Chunk, MTiles,
                       MWarps, KeyWarps, Stages, CopyBytes, false, false, false, Decay> {
    using Base = ChunkLoop<T, HalvingProducts<Returned, Decay::kPairs>, Keys, Values, Chunk, MTiles,
                           MWarps, KeyWarps, Stages, CopyBytes, false, false, false, Decay>;
    using typename Base::Inside;
    using typename Base::Outputs;
    using typename Base::Score;
    using typename Base::Scorer;
    using typename Base::State;
    using Own = float[MTiles][Base::kOwn][4];
    static constexpr int kBuffers = Decay::kBuffers;
    static constexpr int kScoresAt = (Base::kSmemBytes + 15) / 16 * 16;

    static_assert(Stages >= 2 + kBuffers, "three chunks are in use, with two buffers all at once");

public:
    static constexpr int kSmemBytes =
        kScoresAt + Base::kScores * static_cast<int>(sizeof(Score));

    using Base::Base;

    // Computes the outputs of the CTA's steps and the state after them.
    KGEN_DEVICE void run() {
        State state;
        this->load_state(state);
        this->template fill_ring<true>();
        cp_async_wait<kBuffers == 2 ? Stages - 3 : Stages - 2>();
        sync_block();
        const int chunks = this->chunks_;
        Outputs sums;
        Own own = {};
        float nonfinite = 0.0f;  // becomes NaN if an output is not finite
        if constexpr (Decay::kPairs) {
            clear_scores();
            run_paired_chunks(state, sums, own, nonfinite);
        } else {
            if (chunks > 0) factor(0);

#pragma unroll 1
            for (int chunk = 0; chunk < chunks; ++chunk) {
                sync_block();
                // 1. Decayed rows of `chunk` and scores of chunk - 1 are visible to all. With two buffers so are rows
                // of chunk + 1, and the slot and the decayed rows of chunk - 2 are free.
                if (kBuffers == 2 && chunk > 0) this->template stage<true>();
                if (chunk > 0) finish(sums, own, chunk - 1, nonfinite);
                this->factors_.select(chunk % kBuffers);
                const T* tile = tile_of(chunk);
                this->factors_.template scores<Scorer, Inside>(
                    tile, tile + Base::kKeyTile, scores_of(chunk), Base::kScoreStride, Base::kPlane);
                clear(sums);
                this->carry(sums, state, this->factors_.carried());
                this->decay_state(state);
                this->template update<false>(sums, state, tile, nullptr);
                if constexpr (kBuffers == 1) {
                    cp_async_wait<Stages - 3>();
                    sync_block();
                    // Rows of chunk + 1 are visible to all; the decayed rows and the slot of chunk - 1 are free.
                    this->template stage<true>();
                }
                // 2. The rows with decays of the next chunk.
                if (chunk + 1 < chunks) factor(chunk + 1);
                if constexpr (kBuffers == 2) cp_async_wait<Stages - 4>();
            }
        }
        cp_async_wait_all();
        sync_block();
        if (chunks > 0) finish(sums, own, chunks - 1, nonfinite);
        if constexpr (Base::kLate) {
            sync_block();
            if (chunks > 0) this->write_outputs(own, chunks - 1, nonfinite);
        }
        const RecurrenceStates& states = this->states_;
        if (states.final_state != nullptr) this->store_state(state, states.final_factor, nonfinite);
        if (Base::block_any_nonfinite(nonfinite))
            run_step_by_step<T, Keys, Values, Base::kBlockV, Base::kThreads, false, false, false,
                             true>(this->rows_, states, this->decay_);
    }

private:
    // The chunks of run() in another order, with the rows of halving_pairs.cuh. Rows of the next chunk are loaded
    // before the products of this chunk, so that their decays can overlap these products. The last iteration decays
    // rows that nothing reads.
    KGEN_DEVICE void run_paired_chunks(State& state, Outputs& sums, Own& own, float& nonfinite) {
        using Factors = typename Base::Factors;
        const int chunks = this->chunks_;
        if (chunks > 0) factor(0);
        typename Factors::Lanes rows[Factors::kLaneGroups];
        int slot = 0;

#pragma unroll 1
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const int next = slot == Stages - 1 ? 0 : slot + 1;
            const T* tile = tile_in(slot);
            const T* next_tile = tile_in(next);
            sync_block();
            // 1. As in run().
            if (kBuffers == 2 && chunk > 0) this->template stage<true>();
            if (chunk > 0) finish(sums, own, chunk - 1, nonfinite);
            this->factors_.select(chunk % kBuffers);
            this->factors_.template scores<Scorer, Inside>(
                tile, tile + Base::kKeyTile, scores_of(chunk), Base::kScoreStride, Base::kPlane);
            if constexpr (kBuffers == 2)
                this->factors_.load_pairs(rows, next, next_tile, next_tile + Base::kKeyTile);
            clear(sums);
            this->carry(sums, state, this->factors_.carried());
            this->decay_state(state);
            this->template update<false>(sums, state, tile, nullptr);
            if constexpr (kBuffers == 1) {
                cp_async_wait<Stages - 3>();
                sync_block();
                this->template stage<true>();
                this->factors_.load_pairs(rows, next, next_tile, next_tile + Base::kKeyTile);
            }
            // 2. The rows with decays of the next chunk.
            this->factors_.store_pairs(rows, next, (chunk + 1) % kBuffers);
            if constexpr (kBuffers == 2) cp_async_wait<Stages - 4>();
            slot = next;
        }
    }

    // Scores of a step with later steps are zero in all chunks. The caller's next barrier comes before they are read.
    KGEN_DEVICE void clear_scores() {
        for (int i = thread_rank(); i < Base::kScores; i += Base::kThreads)
            scores_of(0)[i] = scores_of(1)[i] = from_float<Score>(0.0f);
    }

    KGEN_DEVICE const T* tile_in(int slot) const { return this->ring_ + slot * Base::kStage; }

    KGEN_DEVICE const T* tile_of(int chunk) const {
        return this->ring_ + chunk % Stages * Base::kStage;
    }

    KGEN_DEVICE Score* scores_of(int chunk) const {
        return chunk % 2 == 0 ? this->scores_
                              : reinterpret_cast<Score*>(dynamic_smem<char>() + kScoresAt);
    }

    KGEN_DEVICE void factor(int chunk) {
        const T* tile = tile_of(chunk);
        this->factors_.factor(chunk % Stages, tile, tile + Base::kKeyTile,
                              chunk % kBuffers);
    }

    static KGEN_DEVICE void clear(Outputs& sums) {
#pragma unroll
        for (int m = 0; m < MTiles; ++m)
#pragma unroll
            for (int tile = 0; tile < Base::kStepTiles; ++tile)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[m][tile][i] = 0.0f;
    }

    // Adds the products within the chunk to its outputs. With several key warps the outputs wait for the next barrier.
    KGEN_DEVICE void finish(Outputs& sums, Own& own, int chunk, float& nonfinite) {
        if (Base::kLate && chunk > 0) this->write_outputs(own, chunk - 1, nonfinite);
        this->intra_chunk_only(sums, tile_of(chunk), scores_of(chunk));
        this->exchange_outputs(own, sums, chunk % 2);
        if constexpr (!Base::kLate) this->write_outputs(own, chunk, nonfinite);
    }
};

}  // namespace kgen
