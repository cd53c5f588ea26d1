// chunk_parallel, first kernel: the states of a linear recurrence before each chunk of its steps.
//
//     S_t = S_{t-1} + b_t v_t^T
//
// A CTA loops over all steps for a tile [KeyTile x ValueTile] of the state, kept in accumulators, so no scan over
// chunks is needed. Before each chunk it writes the tile as two terms of T (bf16), the operand type of
// chunk_outputs.cuh. If all rows b have one sign, the keys of a state are large together; one term would then have
// large errors where the products of a row a with it cancel.
//
// StateFragments, the state tile of one warp, is also used by the warp_specialized and split_t kernels.
//
// Layout: a stored state is [2][whole_fragments(Keys)][whole_fragments(Values)] of T: high terms, then low ones.
//
// Shared memory: T ring[Stages][b: Batch x kKeyStride; v: Batch x kValueStride].
//
// Synchronisation: one cp.async group and one block barrier per batch of steps. With programmatic dependent launch the
// second kernel waits for the end of this one (griddepcontrol_wait), not for single chunks.
#pragma once

#include "kgen/chunked/chunk_mma.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// The state tile of one warp, in accumulators. KeyTiles: fragments of 16 keys; ValuePairs: pairs of tiles of 8 value
// features; Steps: steps per call of add(). T is bf16. Exact: the sums of a call are added in fp32, for a state that
// is returned: tensor cores truncate what they add to, and over thousands of steps that shows.
template <class T, int KeyTiles, int ValuePairs, int Steps, bool Exact = false>
class StateFragments {
    // Two independent chains of products hide their latency, where there are registers for two.
    static constexpr int kChains = KeyTiles * ValuePairs <= 4 && Steps >= 32 && !Exact ? 2 : 1;
    static constexpr int kDeep = KeyTiles + ValuePairs <= 6 ? min(Steps / 16, 4) : 1;
    using Half = HalfOperands<T>;

    static_assert(sizeof(T) == 2 && Steps % 16 == 0, "whole fragments of 16 bits");

public:
    // S += B^T V of `Steps` rows.
    KGEN_DEVICE void add(const T* b, int b_stride, const T* v, int v_stride) {
        if constexpr (Exact) {
            StateFragments<T, KeyTiles, ValuePairs, Steps> of_call{};
            of_call.add(b, b_stride, v, v_stride);
            for_all([&](int m, int n, int i, int, int) { sums_[0][m][n][i] += of_call.at(m, n, i); });
        } else {
            multiply(b, b_stride, v, v_stride);
        }
    }

    // Accumulator i of tile (m, n): the element of key key_of(m, i) and value feature value_of(n, i).
    KGEN_DEVICE float at(int m, int n, int i) const {
        float sum = sums_[0][m][n][i];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) sum += sums_[chain][m][n][i];
        return sum;
    }
    static KGEN_DEVICE int key_of(int m, int i) { return 16 * m + mma_lane().g + i / 2 * 8; }
    static KGEN_DEVICE int value_of(int n, int i) { return 8 * n + 2 * mma_lane().q + i % 2; }

    // Calls body(m, n, i, key, value) for all elements of the lane.
    template <class Body>
    static KGEN_DEVICE void for_all(Body body) {
#pragma unroll
        for (int m = 0; m < KeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < 2 * ValuePairs; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) body(m, n, i, key_of(m, i), value_of(n, i));
    }

    KGEN_DEVICE void set(int m, int n, int i, float x) { sums_[0][m][n][i] = x; }

    // Writes value_at(m, n, i) of all elements as T; inside(key, value) tells whether four elements from there on are
    // inside the target.
    template <class ValueAt, class Inside>
    KGEN_DEVICE void store(T* target, int stride, ValueAt value_at, Inside inside) const {
        Vec<u32, 2> quads[KeyTiles][2][ValuePairs];
#pragma unroll
        for (int m = 0; m < KeyTiles; ++m)
#pragma unroll
            for (int n = 0; n < ValuePairs; ++n) {
                float tiles[2][4];
#pragma unroll
                for (int i = 0; i < 8; ++i) tiles[i / 4][i % 4] = value_at(m, 2 * n + i / 4, i % 4);
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    quads[m][half][n] = quad_of_row<T>(tiles[0], tiles[1], half);
            }
        const int g = mma_lane().g, column = column_of_quad();
#pragma unroll
        for (int row = 0; row < 16 * KeyTiles; row += 8)
#pragma unroll
            for (int n = 0; n < ValuePairs; ++n)
                if (inside(g + row, column + 16 * n))
                    *reinterpret_cast<Vec<u32, 2>*>(target + (g + row) * stride + column + 16 * n) =
                        quads[row / 16][row / 8 % 2][n];
    }

private:
    // The operands of kDeep fragments of steps are loaded before the first product: a scheduler often has only this
    // warp, and no other warp's products would hide the loads.
    KGEN_DEVICE void multiply(const T* b, int b_stride, const T* v, int v_stride) {
#pragma unroll
        for (int first = 0; first < Steps / 16; first += kDeep) {
            typename Half::A keys[kDeep][KeyTiles];
            typename Half::B values[kDeep][ValuePairs][2];
#pragma unroll
            for (int step = 0; step < kDeep; ++step) {
                const int row = 16 * (first + step);
#pragma unroll
                for (int n = 0; n < ValuePairs; ++n)
                    Half::two_columns(values[step][n], v + row * v_stride + 16 * n, v_stride);
#pragma unroll
                for (int m = 0; m < KeyTiles; ++m)
                    keys[step][m] = Half::a_columns(b + row * b_stride + 16 * m, b_stride);
            }
#pragma unroll
            for (int step = 0; step < kDeep; ++step)
#pragma unroll
                for (int m = 0; m < KeyTiles; ++m)
#pragma unroll
                    for (int n = 0; n < 2 * ValuePairs; ++n)
                        Half::template multiply<0>(sums_[step % kChains][m][n], keys[step][m],
                                                   values[step][n / 2][n % 2]);
        }
    }

    float sums_[kChains][KeyTiles][2 * ValuePairs][4] = {};
};

// Prefetches the 128-byte line of `source` to L2. Nothing waits for it.
KGEN_DEVICE void prefetch_l2_line([[maybe_unused]] const void* source) {
#if !KGEN_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(source)));
#endif
}

// The states of one head.
template <class T>
struct ChunkStateTensors {
    const float* initial;  // [Keys][Values], or null: zeros
    T* before;             // [chunks][2][whole_fragments(Keys)][whole_fragments(Values)]
    float* end;            // [Keys][Values], or null: not written
    float factor;          // S = initial + factor * sum
};

// KeyTile, ValueTile: features of a CTA; KeyWarps, ValueWarps: its warps along them. Chunk: steps between two states;
// Batch: steps per barrier; Stages: batches in shared memory; CopyBytes: bytes of one cp.async. Exact: as above.
template <class T, int Keys, int Values, int KeyTile, int ValueTile, int KeyWarps, int ValueWarps,
          int Chunk, int Batch, int Stages, int CopyBytes, bool Exact = false>
class ChunkStates {
    static_assert(sizeof(T) == 2, "states are written as 16 bits");
    static_assert(KeyTile % (16 * KeyWarps) == 0 && ValueTile % (16 * ValueWarps) == 0,
                  "a warp has whole fragments, pairs of tiles of 8 values");
    static_assert(Chunk % Batch == 0 && Batch % 16 == 0, "a chunk is whole batches of fragments");
    static_assert(Stages >= 2, "one batch is in use while others are being copied");

    static constexpr int kKeyTiles = KeyTile / (16 * KeyWarps);        // of 16, per warp
    static constexpr int kValuePairs = ValueTile / (16 * ValueWarps);  // of two tiles of 8
    static constexpr int kKeyStride = chunk_row_stride<T>(KeyTile);
    static constexpr int kValueStride = chunk_row_stride<T>(ValueTile);
    static constexpr int kStage = Batch * (kKeyStride + kValueStride);
    static constexpr int kAllKeys = whole_fragments(Keys), kAllValues = whole_fragments(Values);
    using Tile = StateFragments<T, kKeyTiles, kValuePairs, Batch, Exact>;

public:
    static constexpr int kThreads = 32 * KeyWarps * ValueWarps;
    static constexpr int kKeyBlocks = (Keys + KeyTile - 1) / KeyTile;
    static constexpr int kValueBlocks = (Values + ValueTile - 1) / ValueTile;
    static constexpr int kBlocks = kKeyBlocks * kValueBlocks;  // of one head
    static constexpr int kSmemBytes = Stages * kStage * static_cast<int>(sizeof(T));

    // b, v: rows with all features of the head. block: the CTA's tile, of kBlocks. Give the kernel
    // __launch_bounds__(kThreads, 1): without it ptxas saves registers and loads operands one after the other.
    KGEN_DEVICE ChunkStates(StepRows<const T> b, StepRows<const T> v, i64 steps,
                            const ChunkStateTensors<T>& ends, int block)
        : ends_(ends),
          key0_(block / kValueBlocks * KeyTile),
          value0_(block % kValueBlocks * ValueTile),
          copy_b_(b.from(key0_), 0, min(Keys - key0_, KeyTile)),
          copy_v_(v.from(value0_), 0, min(Values - value0_, ValueTile)),
          ring_(dynamic_smem<T>()) {
        const int warp = thread_rank() / kWarpSize;
        warp_key_ = warp / ValueWarps * 16 * kKeyTiles;
        warp_value_ = warp % ValueWarps * 16 * kValuePairs;
        chunks_ = static_cast<int>(ceil_div(steps, i64{Chunk}));
        // Only the final state needs the last chunk.
        const i64 summed = ends.end != nullptr ? steps : max(chunks_ - 1, 0) * i64{Chunk};
        whole_ = static_cast<int>(summed / Batch);
        last_ = static_cast<int>(summed % Batch);
        batches_ = whole_ + (last_ > 0 ? 1 : 0);
    }

    // end_factor: multiplies the final state only.
    KGEN_DEVICE void run(float end_factor = 1.0f) {
        if (Keys % KeyTile != 0 || Values % ValueTile != 0) {  // padding features are zeros
            for (int i = thread_rank(); i < Stages * kStage; i += kThreads)
                ring_[i] = from_float<T>(0.0f);
            sync_block();
        }
#pragma unroll
        for (int batch = 0; batch < Stages - 1; ++batch) stage();

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

            stage_slot_ = stage_slot_ == Stages - 1 ? 0 : stage_slot_ + 1;
            ++staged_;
        }
        cp_async_commit();
    }



    KGEN_DEVICE void multiply(const T* tile) {
        state_.add(tile + warp_key_, kKeyStride, tile + Batch * kKeyStride + warp_value_,
                   kValueStride);
    }

    // The state at accumulator i of tile (m, n).
    KGEN_DEVICE float at(int m, int n, int i) const {
        const float sum = state_.at(m, n, i) * ends_.factor;
        if (ends_.initial == nullptr) return sum;
        const int key = key_of(Tile::key_of(m, i)), value = value_of(Tile::value_of(n, i));
        return key < Keys && value < Values ? sum + ends_.initial[key * Values + value] : sum;
    }

    KGEN_DEVICE int key_of(int of_warp) const { return key0_ + warp_key_ + of_warp; }
    KGEN_DEVICE int value_of(int of_warp) const { return value0_ + warp_value_ + of_warp; }

    KGEN_DEVICE void store_before(int chunk) const {
        constexpr int kState = kAllKeys * kAllValues;
        T* target = ends_.before + static_cast<i64>(chunk) * 2 * kState + key_of(0) * kAllValues + value_of(0);
        const auto inside = [&](int key, int value) {
            return (kAllKeys % KeyTile == 0 || key_of(key) < kAllKeys) &&
                   (kAllValues % ValueTile == 0 || value_of(value) < kAllValues);
        };
        state_.store(target, kAllValues, [&](int m, int n, int i) { return at(m, n, i); }, inside);
        state_.store(
            target + kState, kAllValues,
            [&](int m, int n, int i) {
                const float x = at(m, n, i);
                return x - to_float(from_float<T>(x));
            },
            inside);
    }

    KGEN_DEVICE void store_end(float factor) const {
        Tile::for_all([&](int m, int n, int i, int of_key, int of_value) {
            const int key = key_of(of_key), value = value_of(of_value);
            if (key < Keys && value < Values)
                ends_.end[key * Values + value] = at(m, n, i) * factor;
        });
    }

    const ChunkStateTensors<T> ends_;
    int key0_, value0_;  // the CTA's first features
    ChunkCopier<T, Batch, KeyTile, CopyBytes, kThreads> copy_b_;
    ChunkCopier<T, Batch, ValueTile, CopyBytes, kThreads> copy_v_;
    T* ring_;  // [Stages][b: Batch x kKeyStride; v: Batch x kValueStride]
    Tile state_;
    int warp_key_, warp_value_;  // the warp's first features in the CTA's tile
    int chunks_, batches_;
    int whole_, last_;  // batches with all their steps; steps of a partial last batch, or 0
    int staged_ = 0, stage_slot_ = 0;
};

// Prefetches `count` rows of Width elements to L2, from step `first` on; `left` of them exist. By the threads with
// `rank` 0 to Threads - 1.
template <int Width, int Threads, class T>
KGEN_DEVICE void prefetch_l2(const StepRows<const T>& rows, i64 first, int left, int rank, int count) {
    constexpr int kLine = 128 / static_cast<int>(sizeof(T));
    constexpr int kLines = (Width + kLine - 1) / kLine;  // of a row
    const StepRows<const T> there{rows.at(first), rows.stride};
#pragma unroll
    for (int i = rank; i < count * kLines; i += Threads)
        if (i / kLines < left) prefetch_l2_line(there.at(i / kLines) + i % kLines * kLine);
}

}  // namespace kgen
