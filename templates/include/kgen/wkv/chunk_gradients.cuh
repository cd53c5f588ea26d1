// Gradients of one chunk by a block, in wkv5's and wkv6's backward pass: copies and gv. The kernel in
// templates/wkv/backward_chunk_loop.cu.jinja calls the phases in order, with the block barriers between them:
//
//     1. copies       k, r, w, then v and gy                                       chunk_gradients.cuh
//     2. decays       rows of r and k times products of decays                     state_passing.cuh
//     3. states       S g, G v and the inter-chunk part of gv, every 16 steps      state_passing.cuh
//     4. products     n_sj = v_s . g_j of 16 steps                                 chunk_scores.cuh
//     5. keys         gr, gk, gw, parts of gu, scores                              chunk_scores.cuh, scores.cuh
//     6. gv           inter-chunk part + scores * g                                chunk_gradients.cuh
//
// Shared memory: chunk_memory.cuh.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/wkv/chunk_scores.cuh"
#include "kgen/wkv/state_passing.cuh"

namespace kgen::wkv {

// C: a BackwardConfig. shared_index: the chunk's index in shared memory, for threads that dropped theirs.
template <class C, class U>
struct ChunkGradients {
    using Memory = ChunkMemory<C>;
    using T = typename C::T;
    using W = typename C::W;
    static constexpr int kSubs = Memory::kSubs, kValues = C::kValues;
    static constexpr int kWarps = C::kWarps, kThreads = C::kThreads;
    static constexpr int kRowStride = Memory::kRowStride;

    const ChunkTensors<T, W, U>& tensors;
    ChunkIndex* shared_index;
    float scale;
    Memory memory;

    // Once per block: padding that no copy writes.
    KGEN_DEVICE void clear_padding() const {
        if constexpr (kValues > C::kV) {
            for (int i = thread_rank(); i < 2 * C::kChunk * kRowStride; i += kThreads)
                memory.v[i] = from_float<T>(0.0f);
            sync_block();
        }
    }

    // Starts the copies of k, r and w of a chunk, a group of its own.
    KGEN_DEVICE void copy_keys(const ChunkIndex& index) const {
        copy<C::kK, C::kCopyBytes>(memory.chunk_k(), Memory::kKeyStride, tensors.k, index);
        copy<C::kK, C::kCopyBytes>(memory.chunk_r(), Memory::kKeyStride, tensors.r, index);
        if constexpr (C::kPerStep)
            copy<C::kK, C::kCopyBytesW>(memory.chunk_w(), C::kKeys, tensors.w, index);
        cp_async_commit();
    }

    // Starts the copies of v and gy of a chunk, a group of its own.
    KGEN_DEVICE void copy_values(const ChunkIndex& index) const {
        copy<C::kV, C::kCopyBytes>(memory.v, kRowStride, tensors.v, index);
        copy<C::kV, C::kCopyBytes>(memory.g, kRowStride, tensors.gy, index);
        cp_async_commit();
    }

    // gv of a chunk: the inter-chunk part, and scores times rows of gy. A lane has one or two values of 16 steps.
    KGEN_DEVICE void write_gv() const {
        // Two values of a lane share the loads of scores, if all warps have work all the same.
        constexpr int kCount = kSubs * ceil_div(kValues, 2 * kWarpSize) >= kWarps ? 2 : 1;
        constexpr int kUnits = ceil_div(kValues, kCount * kWarpSize);
        const int rank = read_thread_rank();
        const ChunkIndex index = *shared_index;
#pragma unroll 1
        for (int unit = rank / kWarpSize; unit < kSubs * kUnits; unit += kWarps) {
            const int sub = unit / kUnits;
            const int value = unit % kUnits * kCount * kWarpSize + rank % kWarpSize;
            const auto there = [&](int i) {
                return C::kV % (kCount * kWarpSize) == 0 || value + i * kWarpSize < C::kV;
            };
            const T* rows = memory.rows_of(memory.g, sub) + value;
            float g[kCount][kSubSteps];
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int s = 0; s < kSubSteps; ++s)
                    g[i][s] = there(i) ? to_float(rows[s * kRowStride + i * kWarpSize]) : 0.0f;
            const float* inter = memory.decayed_k + sub * Memory::kWideSub + value;
            const int left = index.left - sub * kSubSteps;
            T* gv = index.steps(tensors.gv).at(index.first(C::kChunk) + sub * kSubSteps) + value;
            const float* scores = memory.scores + sub * Memory::kSubScores;
            multiply_scores(
                scores, scores + Memory::kGroups * kScoresPadded, g, scale,
                [&](int s, int i) {
                    return there(i) ? inter[s * Memory::kWideStride + i * kWarpSize] : 0.0f;
                },
                [&](int s, int i, float sum) {
                    const T of_value = from_float<T>(sum);
                    if (s < left && there(i)) gv[i * kWarpSize] = of_value;
                    if (i + 1 == kCount) gv += tensors.gv.stride_t;
                });
        }
    }

private:
    // Rows of the chunk to shared memory; steps that do not exist are zeros.
    template <int Width, int CopyBytes, class X>
    static KGEN_DEVICE void copy(X* tile, int tile_stride, const Rows<const X>& rows,
                                 const ChunkIndex& index) {
        copy_rows<X, C::kChunk, Width, CopyBytes, kThreads>(
            tile, tile_stride, index.steps(rows), index.first(C::kChunk), index.left);
    }
};

}  // namespace kgen::wkv
