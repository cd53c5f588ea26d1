// Gradients of one chunk by a block, in wkv5's and wkv6's backward pass: copies, gv, and write_chunk_gradients(), which
// calls the phases in order, with the block barriers between them:
//
//     1. copies       k, r, w, then v and gy                                       chunk_gradients.cuh
//     2. decays       rows of r and k times products of decays                     state_passing.cuh
//     3. states       S g, G v and the inter-chunk part of gv, every 16 steps      state_passing.cuh
//     4. products     n_sj = v_s . g_j of 16 steps                                 chunk_scores.cuh
//     5. keys         gr, gk, gw, parts of gu, scores                              chunk_scores.cuh, scores.cuh
//     6. gv           inter-chunk part + scores * g            chunk_gradients.cuh, or level_scores.cuh if kLevelScores
//
// Shared memory: chunk_memory.cuh.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/wkv/chunk_scores.cuh"
#include "kgen/wkv/level_scores.cuh"
#include "kgen/wkv/state_passing.cuh"

namespace kgen::wkv {

// C: a BackwardConfig. shared_index: the chunk's index in shared memory, for code that no longer has it in registers.
template <class C, class U>
struct ChunkGradients {
    using Memory = ChunkMemory<C>;
    using Index = typename Memory::Index;
    using T = typename C::T;
    using W = typename C::W;
    using Gradient = typename C::Gradient;
    static constexpr int kSubs = Memory::kSubs, kValues = C::kValues;
    static constexpr int kWarps = C::kWarps, kThreads = C::kThreads;
    static constexpr int kRowStride = Memory::kRowStride;

    const ChunkTensors<C, U>& tensors;
    Index* shared_index;
    float scale;
    Memory memory;

    // Called once per block: clears padding that no copy writes.
    KGEN_DEVICE void clear_padding() const {
        if constexpr (kValues > C::kV) {
            for (int i = thread_rank(); i < 2 * C::kChunk * kRowStride; i += kThreads)
                memory.v[i] = from_float<T>(0.0f);
            sync_block();
        }
    }

    // Starts the copies of k, r and w of a chunk, as one group.
    KGEN_DEVICE void copy_keys(const Index& index) const {
        copy<C::kK, C::kCopyBytes>(memory.chunk_k(), Memory::kKeyStride, tensors.k, index);
        copy<C::kK, C::kCopyBytes>(memory.chunk_r(), Memory::kKeyStride, tensors.r, index);
        if constexpr (C::kPerStep)
            copy<C::kK, C::kCopyBytesW>(memory.chunk_w(), C::kKeys, tensors.w, index);
        cp_async_commit();
    }

    // Starts the copies of v and gy of a chunk, as one group.
    KGEN_DEVICE void copy_values(const Index& index) const {
        copy<C::kV, C::kCopyBytes>(memory.v, kRowStride, tensors.v, index);
        copy<C::kV, C::kCopyBytes>(memory.g, kRowStride, tensors.gy, index);
        cp_async_commit();
    }

    // gv of a chunk: the inter-chunk part, and scores times rows of gy. A lane has one or two values of 16 steps.
    KGEN_DEVICE void write_gv() const {
        // Two values of a lane share the loads of scores, unless some warps would then have no work.
        constexpr int kCount = kSubs * ceil_div(kValues, 2 * kWarpSize) >= kWarps ? 2 : 1;
        constexpr int kUnits = ceil_div(kValues, kCount * kWarpSize);
        const int rank = read_thread_rank();
        const Index index = *shared_index;
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
            Gradient* gv = index.steps(tensors.gv).at(index.first(C::kChunk) + sub * kSubSteps) + value;
            const float* scores = memory.scores + sub * Memory::kSubScores;
            multiply_scores(
                scores, scores + Memory::kGroups * kScoresPadded, g, scale,
                [&](int s, int i) {
                    return there(i) ? inter[s * Memory::kWideStride + i * kWarpSize] : 0.0f;
                },
                [&](int s, int i, float sum) {
                    const Gradient of_value = from_float<Gradient>(sum);
                    if (s < left && there(i)) gv[i * kWarpSize] = of_value;
                    if (i + 1 == kCount) gv += tensors.gv.stride_t;
                });
        }
    }

private:
    // Starts the copies of rows of the chunk to shared memory; steps that do not exist are zeros.
    template <int Width, int CopyBytes, class X, class R>
    static KGEN_DEVICE void copy(X* tile, int tile_stride, const R& rows, const Index& index) {
        copy_rows<X, C::kChunk, Width, CopyBytes, kThreads>(
            tile, tile_stride, index.steps(rows), index.first(C::kChunk), index.left);
    }
};

// All gradients of a chunk, by a block. If C::kSequential, the copies of the chunk's k, r and w are already in flight,
// and the copies for the chunk before it (in time) are started at the end. state, gradient: this warp's tiles of S
// before the chunk and of the gradient of the state after it; if C::kSequential, the latter is overwritten by the
// gradient before the chunk.
template <class C, class U>
KGEN_DEVICE void write_chunk_gradients(const ChunkGradients<C, U>& chunk,
                                       const typename ChunkMemory<C>::Index& index,
                                       const float* state, float* gradient, float* gu_parts,
                                       float* gw_parts) {
    using Gradients = ChunkGradients<C, U>;
    using Passing = StatePassing<C>;

    // 1. Copies to shared memory; the state before the chunk.
    if constexpr (!C::kSequential) chunk.copy_keys(index);
    chunk.copy_values(index);
    typename Passing::Tile states_16[Gradients::kSubs];  // before each 16 steps
    if constexpr (C::kPdl && !C::kSequential) griddepcontrol_wait(state, gradient);
    states_16[0].load_fragments(state);
    if (thread_rank() == 0) *chunk.shared_index = index;
    cp_async_wait<1>();
    sync_block();

    // 2. Rows of r and k times products of decays.
    const Passing passing{chunk.memory, chunk.scale};
    passing.apply_decays(index, C::kPerStep ? nullptr : index.steps(chunk.tensors.w).at(0));
    cp_async_wait_all();
    sync_block();

    // 3. State passing, 16 steps at a time: S g forward; G v, S . G and G^T k backward.
    passing.run(states_16, state, gradient);
    sync_block();

    // 4. Products of values n_sj = v_s . g_j within 16 steps.
    const ChunkScores<C, U> scores{chunk.memory, chunk.tensors, chunk.shared_index, chunk.scale};
    scores.value_products();
    sync_block();

    // 5. gr, gk, gw, parts of gu, and attention scores: a lane per key.
#pragma unroll 1
    for (int done = 0; scores.key_gradients(done); done += Gradients::kWarps) {
    }
    sync_block();
    scores.reduce(gu_parts, gw_parts);
    const LevelScores<C> levels{chunk.memory, chunk.scale};
    if constexpr (C::kLevelScores) {
        levels.products();
    } else {
        scores.cross_scores();
    }
    sync_block();

    // 6. gv: the inter-chunk part, and scores times g. The next chunk's copies run meanwhile.
    if constexpr (C::kSequential) {
        const auto next = chunk.shared_index->previous(C::kChunk);
        if (next.chunk >= 0) chunk.copy_keys(next);
    }
    if constexpr (C::kLevelScores) {
        levels.write_gv(*chunk.shared_index, chunk.tensors.gv);
    } else {
        chunk.write_gv();
    }
}

}  // namespace kgen::wkv
