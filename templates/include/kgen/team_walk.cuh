// A linear recurrence over the steps of one sequence, by two teams of warps of a block.
//
//     S_t = S_{t-1} + b_t v_t^T          out_t = factor * a_t S_t
//
// One team keeps the state in registers, adds batch after batch of steps, and leaves the state before
// each chunk in shared memory (state_tile.cuh). The other makes the outputs of the batch before
// (chunk_rows.cuh): 16 steps per warp, each warp by itself. So nobody waits for scores, the one thing
// that is serial is a sum of products, and a batch costs one barrier. chunk_walk.cuh, where every warp
// does everything for some value features, waits for its own results instead; but it knows decays, sums
// of keys, TF32 and fp16.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_rows.cuh"
#include "chunk_stage.cuh"
#include "math.cuh"
#include "state_tile.cuh"

namespace kgen {

// Keys, Values: features of a and b, and of v and out; Slice: value features of a block. Chunk: steps
// whose scores are taken; Chunks: of a batch, which has a warp for every 16 steps; KeyWarps, ValueWarps:
// of the other team; Stages: batches in shared memory; CopyBytes: of one copy.
template <class T, int Keys, int Values, int Slice, int Chunk, int Chunks, int KeyWarps,
          int ValueWarps, int Stages, int CopyBytes>
class TeamWalk {
    static constexpr int kKeys = whole_fragments(Keys);
    static constexpr int kBatch = Chunk * Chunks;
    static constexpr int kOutputWarps = kBatch / 16, kTilesPerChunk = Chunk / 16;
    static constexpr int kWarps = kOutputWarps + KeyWarps * ValueWarps;
    using Rows = ChunkRows<T, Keys, Values, Slice, 1, false>;
    using Tile = StateTile<T, kKeys / (16 * KeyWarps), Slice / (16 * ValueWarps), Chunk>;
    static constexpr int kKeyStride = Rows::kKeyStride, kValueStride = Rows::kValueStride;
    // Rows of a are needed a batch later than those of b and v: they have a stage less.
    static constexpr int kKeyRows = kBatch * kKeyStride;
    static constexpr int kStage = kKeyRows + kBatch * kValueStride;  // of b and v
    static constexpr int kRing = Stages * kStage + (Stages - 1) * kKeyRows;
    static constexpr int kState = kKeys * kValueStride;

    static_assert(kKeys % (16 * KeyWarps) == 0 && Slice % (16 * ValueWarps) == 0,
                  "a warp has whole fragments of the state, of values in pairs");
    static_assert(Chunk % 16 == 0, "a chunk is whole fragments");
    static_assert(Stages >= 3, "two batches are in use while others are on the way");
    static_assert(kWarps <= 32, "a block has at most 32 warps");

public:
    static constexpr int kThreads = kWarps * kWarpSize;
    static constexpr int kSlices = (Values + Slice - 1) / Slice;
    static constexpr int kSmemBytes = max((kRing + 2 * Chunks * kState) *
                                              static_cast<int>(sizeof(T)),
                                          plain_walk_bytes(Keys, Slice));

    // Of v, out and the states the slice's features alone.
    KGEN_DEVICE TeamWalk(const WalkRows<T>& rows, const WalkStates& states)
        : rows_(rows),
          states_(states),
          copy_a_(rows.a, rows.first, Keys),
          copy_b_(rows.b, rows.first, Keys),
          copy_v_(rows.v, rows.first, rows.values) {
        // Shared memory: T ring[Stages][b: kBatch x kKeyStride; v: kBatch x kValueStride],
        // a[Stages - 1][kBatch x kKeyStride], states[2][Chunks][kKeys][kValueStride].
        ring_ = dynamic_smem<T>();
        ring_a_ = ring_ + Stages * kStage;
        before_ = ring_ + kRing;
        const i64 steps = rows.end - rows.first;
        whole_ = static_cast<int>(steps / kBatch);
        last_ = static_cast<int>(steps % kBatch);
        batches_ = whole_ + (last_ > 0 ? 1 : 0);
        const int warp = thread_rank() / kWarpSize;
        adds_ = warp >= kOutputWarps;
        const int of_team = warp - kOutputWarps;
        key0_ = of_team / ValueWarps * (kKeys / KeyWarps);
        value0_ = of_team % ValueWarps * (Slice / ValueWarps);
        const int unit = balanced_unit(warp, kOutputWarps, warp / 4 % 2 != 0);
        chunk_ = unit / kTilesPerChunk;
        tile_ = unit % kTilesPerChunk;
    }

    KGEN_DEVICE void walk() {
        if (kKeys > Keys || rows_.values < Slice) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < kRing; i += kThreads)
                ring_[i] = from_float<T>(0.0f);
            sync_block();
        }
        Tile state;
        if (adds_ && states_.state != nullptr) begin(state);
#pragma unroll
        for (int batch = 0; batch < Stages - 2; ++batch) stage();
        float poison = 0.0f;
#pragma unroll 1
        for (int batch = 0; batch <= batches_; ++batch) {
            cp_async_wait<Stages - 3>();
            sync_block();
            stage();
            if (adds_) {
                if (batch < batches_) add(state, batch);
            } else if (batch > 0) {
                poison += write(batch - 1);
            }
        }
        cp_async_wait_all();
        if (adds_ && states_.end != nullptr) end(state);
        if (block_has<kWarps>(poison))
            walk_plainly<T, Keys, Values, Slice, kThreads, false, false, false, true>(
                rows_, states_, NoDecayRows{});
    }

private:
    // Start copies of the next batch of b and v, and of the one before it of a.
    KGEN_DEVICE void stage() {
        if (staged_ < batches_) {
            T* tile = ring_ + staged_ % Stages * kStage;
            if (staged_ < whole_) {
                copy_b_.template start<true>(tile, kKeyStride, kBatch);
                copy_v_.template start<true>(tile + kKeyRows, kValueStride, kBatch);
            } else {
                copy_b_.template start<false>(tile, kKeyStride, last_);
                copy_v_.template start<false>(tile + kKeyRows, kValueStride, last_);
            }
        }
        if (staged_ > 0 && staged_ <= batches_) {
            T* tile = ring_a_ + (staged_ - 1) % (Stages - 1) * kKeyRows;
            if (staged_ <= whole_) {
                copy_a_.template start<true>(tile, kKeyStride, kBatch);
            } else {
                copy_a_.template start<false>(tile, kKeyStride, last_);
            }
        }
        ++staged_;
        cp_async_commit();
    }

    // Of a chunk.
    KGEN_DEVICE const T* a_of(int batch, int chunk) const {
        return ring_a_ + batch % (Stages - 1) * kKeyRows + chunk * Chunk * kKeyStride;
    }
    KGEN_DEVICE const T* b_of(int batch, int chunk) const {
        return ring_ + batch % Stages * kStage + chunk * Chunk * kKeyStride;
    }
    KGEN_DEVICE const T* v_of(int batch, int chunk) const {
        return ring_ + batch % Stages * kStage + kKeyRows + chunk * Chunk * kValueStride;
    }

    KGEN_DEVICE T* before(int batch, int chunk) const {
        return before_ + (batch % 2 * Chunks + chunk) * kState;
    }

    KGEN_DEVICE void add(Tile& state, int batch) const {
#pragma unroll 1
        for (int chunk = 0; chunk < Chunks; ++chunk) {
            state.store(
                before(batch, chunk) + key0_ * kValueStride + value0_, kValueStride,
                [&](int m, int n, int i) { return state.at(m, n, i); },
                [](int, int) { return true; });
            state.add(b_of(batch, chunk) + key0_, kKeyStride, v_of(batch, chunk) + value0_,
                      kValueStride);
        }
    }

    // Returns NaN if not all of it is finite.
    KGEN_DEVICE float write(int batch) const {
        const int left = (batch < whole_ ? kBatch : last_) - chunk_ * Chunk;
        if (left <= 16 * tile_) return 0.0f;
        Rows outputs(rows_, tile_);
        outputs.read(a_of(batch, chunk_));
        outputs.template carry<false>(before(batch, chunk_));
        outputs.look_back(b_of(batch, chunk_), v_of(batch, chunk_));
        return outputs.write(rows_.first + static_cast<i64>(batch) * kBatch + chunk_ * Chunk, left,
                             states_.bias);
    }

    KGEN_DEVICE void begin(Tile& state) const {
        Tile::for_all([&](int m, int n, int i, int of_key, int of_value) {
            const int key = key0_ + of_key, value = value0_ + of_value;
            if (key < Keys && value < rows_.values)
                state.set(m, n, i, states_.template first<false>(key, value, Keys, Values));
        });
    }

    KGEN_DEVICE void end(const Tile& state) const {
        Tile::for_all([&](int m, int n, int i, int of_key, int of_value) {
            const int key = key0_ + of_key, value = value0_ + of_value;
            if (key < Keys && value < rows_.values)
                states_.store_end(key, value, state.at(m, n, i) * states_.end_factor);
        });
    }

    template <int Width, int Rows>
    using Copier = ChunkCopier<T, Rows, Width, CopyBytes, kThreads>;

    const WalkRows<T>& rows_;
    const WalkStates& states_;
    Copier<Keys, kBatch> copy_a_, copy_b_;
    Copier<Slice, kBatch> copy_v_;
    T *ring_, *ring_a_, *before_;
    int batches_, whole_, last_;  // batches, those with all steps, steps of the one that has not
    bool adds_;                   // the warp is of the team that keeps the state
    int key0_, value0_;           // first features of its tile of the state
    int chunk_, tile_;            // or its 16 steps in a batch
    int staged_ = 0;
};

}  // namespace kgen
