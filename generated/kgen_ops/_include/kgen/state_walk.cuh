// States of a linear recurrence before each chunk of its steps, without its outputs.
//
//     S_t = S_{t-1} + b_t v_t^T
//
// A block walks all steps for a tile of the state, [key features x value features], in accumulators:
// so the walk needs neither sums of its own for each chunk nor a scan over them. Before each chunk it
// writes the state as T, which is what products take it as (chunk_outputs.cuh). T has 16 bits and the
// range of fp32 (bf16).
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_rows.cuh"
#include "chunk_stage.cuh"
#include "math.cuh"
#include "memory.cuh"
#include "state_tile.cuh"
#include "warp.cuh"

namespace kgen {

// Have L2 fetch the line of 128 bytes that `source` lies in: a hint, and nothing waits for it.
KGEN_DEVICE void prefetch_line([[maybe_unused]] const void* source) {
#if !KGEN_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(source)));
#endif
}

// What a walk begins with and leaves, of one head. Null: zeros, or not asked for.
template <class T>
struct StateEnds {
    const float* initial;  // [Keys][Values]
    T* before;             // [chunks][whole_fragments(Keys)][whole_fragments(Values)]
    float* end;            // [Keys][Values]
    float factor;          // of the sum; what it begins with is added to the product
};

// KeyTile, ValueTile: features of a block; KeyWarps, ValueWarps: warps along them. Chunk: steps between
// two states; Batch: steps per barrier; Stages: batches in shared memory; CopyBytes: of one copy.
// Ahead: features of rows that nobody reads here but whoever comes next, and that L2 shall fetch.
template <class T, int Keys, int Values, int KeyTile, int ValueTile, int KeyWarps, int ValueWarps,
          int Chunk, int Batch, int Stages, int CopyBytes, int Ahead = 0>
class StateWalk {
    static_assert(sizeof(T) == 2, "states are written as 16 bits");
    static_assert(KeyTile % (16 * KeyWarps) == 0 && ValueTile % (16 * ValueWarps) == 0,
                  "a warp has whole fragments, of values in pairs");
    static_assert(Chunk % Batch == 0 && Batch % 16 == 0, "a chunk is whole batches of fragments");
    static_assert(Stages >= 2, "one batch is in use while others are on the way");

    static constexpr int kKeyTiles = KeyTile / (16 * KeyWarps);        // of 16, per warp
    static constexpr int kValuePairs = ValueTile / (16 * ValueWarps);  // of two tiles of 8
    static constexpr int kKeyStride = chunk_row_stride<T>(KeyTile);
    static constexpr int kValueStride = chunk_row_stride<T>(ValueTile);
    static constexpr int kStage = Batch * (kKeyStride + kValueStride);
    static constexpr int kAllKeys = whole_fragments(Keys), kAllValues = whole_fragments(Values);
    using Tile = StateTile<T, kKeyTiles, kValuePairs, Batch>;

public:
    static constexpr int kThreads = 32 * KeyWarps * ValueWarps;
    static constexpr int kKeyBlocks = (Keys + KeyTile - 1) / KeyTile;
    static constexpr int kValueBlocks = (Values + ValueTile - 1) / ValueTile;
    static constexpr int kBlocks = kKeyBlocks * kValueBlocks;  // of one head
    static constexpr int kSmemBytes = Stages * kStage * static_cast<int>(sizeof(T));

    // `block`: of kBlocks. Rows b and v with all their features. A kernel of such blocks wants to be bound
    // to one per SM: without a bound ptxas saves registers, and reads operands one after the other.
    KGEN_DEVICE StateWalk(StepRows<const T> b, StepRows<const T> v, i64 steps,
                          const StateEnds<T>& ends, int block, StepRows<const T> ahead = {})
        : ends_(ends),
          ahead_(ahead),
          steps_(steps),
          block_(block),
          key0_(block / kValueBlocks * KeyTile),
          value0_(block % kValueBlocks * ValueTile),
          copy_b_(b.from(key0_), 0, min(Keys - key0_, KeyTile)),
          copy_v_(v.from(value0_), 0, min(Values - value0_, ValueTile)),
          ring_(dynamic_smem<T>()) {
        const int warp = thread_rank() / kWarpSize;
        warp_key_ = warp / ValueWarps * 16 * kKeyTiles;
        warp_value_ = warp % ValueWarps * 16 * kValuePairs;
        chunks_ = static_cast<int>(ceil_div(steps, i64{Chunk}));
        // Nobody asks for what the last chunk adds, if not for the end.
        const i64 walked = ends.end != nullptr ? steps : max(chunks_ - 1, 0) * i64{Chunk};
        whole_ = static_cast<int>(walked / Batch);
        last_ = static_cast<int>(walked % Batch);
        batches_ = whole_ + (last_ > 0 ? 1 : 0);
    }

    // `end_factor`: of the state that is handed out, and of no other.
    KGEN_DEVICE void walk(float end_factor = 1.0f) {
        if (Keys % KeyTile != 0 || Values % ValueTile != 0) {  // features that do not exist are zeros
            for (int i = thread_rank(); i < Stages * kStage; i += kThreads)
                ring_[i] = from_float<T>(0.0f);
            sync_block();
        }
#pragma unroll
        for (int batch = 0; batch < Stages - 1; ++batch) stage();
        if constexpr (Ahead > 0)  // of steps that are not walked
            for (int batch = batches_; batch * i64{Batch} < steps_; ++batch) fetch_ahead(batch);
        constexpr int kPerChunk = Chunk / Batch;
        int slot = 0;
#pragma unroll 1
        for (int batch = 0; batch < batches_; ++batch) {
            cp_async_wait<Stages - 2>();
            sync_block();
            stage();
            if (batch % kPerChunk == 0 && (batch > 0 || ends_.initial != nullptr))
                store_before(batch / kPerChunk);
            multiply(ring_ + slot * kStage);
            slot = slot == Stages - 1 ? 0 : slot + 1;
        }
        cp_async_wait_all();
        if (ends_.end != nullptr) {
            store_end(end_factor);
        } else if (chunks_ > (ends_.initial != nullptr ? 0 : 1)) {
            store_before(chunks_ - 1);
        }
    }

private:
    KGEN_DEVICE void stage() {
        if (staged_ < batches_) {
            T* tile = ring_ + stage_slot_ * kStage;
            if (staged_ < whole_) {
                copy_b_.template start<true>(tile, kKeyStride, Batch);
                copy_v_.template start<true>(tile + Batch * kKeyStride, kValueStride, Batch);
            } else {
                copy_b_.template start<false>(tile, kKeyStride, last_);
                copy_v_.template start<false>(tile + Batch * kKeyStride, kValueStride, last_);
            }
            if constexpr (Ahead > 0) fetch_ahead(staged_);
            stage_slot_ = stage_slot_ == Stages - 1 ? 0 : stage_slot_ + 1;
            ++staged_;
        }
        cp_async_commit();
    }

    // A head's blocks share the lines of a batch's rows.
    KGEN_DEVICE void fetch_ahead(int batch) const {
        constexpr int kLine = 128 / static_cast<int>(sizeof(T));
        constexpr int kLines = (Ahead + kLine - 1) / kLine;  // of a row
        for (int i = thread_rank() * kBlocks + block_; i < Batch * kLines; i += kThreads * kBlocks) {
            const i64 step = batch * i64{Batch} + i / kLines;
            if (step < steps_) prefetch_line(ahead_.at(step) + i % kLines * kLine);
        }
    }

    KGEN_DEVICE void multiply(const T* tile) {
        state_.add(tile + warp_key_, kKeyStride, tile + Batch * kKeyStride + warp_value_,
                   kValueStride);
    }

    // The state at an element of the accumulators.
    KGEN_DEVICE float at(int m, int n, int i) const {
        const float sum = state_.at(m, n, i) * ends_.factor;
        if (ends_.initial == nullptr) return sum;
        const int key = key_of(Tile::key_of(m, i)), value = value_of(Tile::value_of(n, i));
        return key < Keys && value < Values ? sum + ends_.initial[key * Values + value] : sum;
    }

    KGEN_DEVICE int key_of(int of_warp) const { return key0_ + warp_key_ + of_warp; }
    KGEN_DEVICE int value_of(int of_warp) const { return value0_ + warp_value_ + of_warp; }

    KGEN_DEVICE void store_before(int chunk) const {
        T* target = ends_.before + static_cast<i64>(chunk) * kAllKeys * kAllValues +
                    key_of(0) * kAllValues + value_of(0);
        state_.store(
            target, kAllValues, [&](int m, int n, int i) { return at(m, n, i); },
            [&](int key, int value) {
                return (kAllKeys % KeyTile == 0 || key_of(key) < kAllKeys) &&
                       (kAllValues % ValueTile == 0 || value_of(value) < kAllValues);
            });
    }

    KGEN_DEVICE void store_end(float factor) const {
        Tile::for_all([&](int m, int n, int i, int of_key, int of_value) {
            const int key = key_of(of_key), value = value_of(of_value);
            if (key < Keys && value < Values)
                ends_.end[key * Values + value] = at(m, n, i) * factor;
        });
    }

    const StateEnds<T> ends_;
    const StepRows<const T> ahead_;
    const i64 steps_;
    int block_;
    int key0_, value0_;  // the block's first features
    ChunkCopier<T, Batch, KeyTile, CopyBytes, kThreads> copy_b_;
    ChunkCopier<T, Batch, ValueTile, CopyBytes, kThreads> copy_v_;
    T* ring_;  // [Stages][b: Batch x kKeyStride; v: Batch x kValueStride]
    Tile state_;
    int warp_key_, warp_value_;        // the warp's first features in the block's
    int chunks_, batches_, whole_, last_;  // batches, those with all steps, steps of the one that has not
    int staged_ = 0, stage_slot_ = 0;
};

}  // namespace kgen
