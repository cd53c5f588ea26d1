// The chunked backward pass of wkv5 and wkv6: a chunk of steps, by a block.
//
// wkv_state_walk.cuh has put the state before every chunk into the workspace, and the gradient of
// the one behind it unless a block carries that over all chunks of a head. From those a block finds
// the states at every 16th step, again as products of matrices:
//
//     1. forward    z_j = S g_j of 16 steps, S before them; then S behind them
//     2. backward   y_s = G v_s of 16 steps, G behind them; S . G; gv_s = G^T k_s; G before them
//     3.            n_sj = v_s . g_j of 16 steps
//     4.            pairs of steps (wkv_pairs.cuh): gr, gk, gw, and parts of gu
//     5.            gv, with the pairs' sums over keys
//
// The first two are in wkv_chunk_walk.cuh, the next two in wkv_chunk_pairs.cuh.
#pragma once

#include "dependent_launch.cuh"
#include "multiprocessors.cuh"
#include "wkv_chunk_pairs.cuh"
#include "wkv_chunk_walk.cuh"

namespace kgen::wkv {

// C: a ChunkedBackward.
template <class C, class U>
class ChunkGradients {
    using Memory = ChunkMemory<C>;
    using T = typename C::T;
    using W = typename C::W;
    using Tile = typename ChunkWalk<C>::Tile;
    static constexpr int kSubs = Memory::kSubs, kValues = C::kValues;
    static constexpr int kWarps = C::kWarps, kThreads = C::kThreads;
    static constexpr int kRowStride = Memory::kRowStride;

public:
    // kept: in shared memory, for this object's own use.
    KGEN_DEVICE ChunkGradients(const ChunkTensors<T, W, U>& tensors, ChunkPlace* kept, float scale)
        : tensors_(tensors), kept_(kept), scale_(scale) {}

    // Once, before all chunks of a block: what no copy brings.
    KGEN_DEVICE void clear_padding() const {
        if constexpr (kValues > C::kV) {
            for (int i = thread_rank(); i < 2 * C::kChunk * kRowStride; i += kThreads)
                at_.v[i] = from_float<T>(0.0f);
            sync_block();
        }
    }

    // The chunk's k, r and w are on their way if C::kCarry, and then those of the chunk before it
    // are. state, gradient: this warp's tiles, before the chunk and behind it; if C::kCarry the
    // latter becomes the one before it. gu_parts and gw_parts: of all chunks, [K]; the latter
    // only if w has no steps.
    KGEN_DEVICE void find(const ChunkPlace& place, const float* state, float* gradient,
                          float* gu_parts, float* gw_parts) const {
        if constexpr (!C::kCarry) copy_keys(place);
        copy<C::kV, C::kCopy>(at_.v, kRowStride, tensors_.v, place);
        copy<C::kV, C::kCopy>(at_.g, kRowStride, tensors_.gy, place);
        cp_async_commit();
        Tile states[kSubs];
        if constexpr (C::kOverlap && !C::kCarry) wait_for_earlier_kernel(state, gradient);
        states[0].load_fragments(state);  // on their way while decays are taken
        if (thread_rank() == 0) *kept_ = place;
        cp_async_wait<1>();
        sync_block();
        const ChunkWalk<C> walk{at_, scale_};
        walk.take_decays(place, C::kPerStep ? nullptr : place.steps(tensors_.w).at(0));
        cp_async_wait_all();
        sync_block();

        walk.walk(states, state, gradient);
        sync_block();
        const ChunkPairs<C, U> pairs{at_, tensors_, kept_, scale_};
        pairs.multiply_rows();
        sync_block();
#pragma unroll 1
        for (int done = 0; pairs.look_at_unit(done); done += kWarps) {
        }
        sync_block();
        pairs.add_up(gu_parts, gw_parts);
        pairs.multiply_cross();
        sync_block();
        if constexpr (C::kCarry) {
            const ChunkPlace next = before(*kept_);
            if (next.chunk >= 0) copy_keys(next);  // while values are written
        }
        write_values();
    }

    // k, r and w of a chunk, until its walk begins in places of what comes later.
    KGEN_DEVICE void copy_keys(const ChunkPlace& place) const {
        copy<C::kK, C::kCopy>(at_.raw_k(), Memory::kKeyStride, tensors_.k, place);
        copy<C::kK, C::kCopy>(at_.raw_r(), Memory::kKeyStride, tensors_.r, place);
        if constexpr (C::kPerStep) copy<C::kK, C::kCopyW>(at_.raw_w(), C::kKeys, tensors_.w, place);
        cp_async_commit();
    }

    // The chunk before one, -1 if that is the first.
    static KGEN_DEVICE ChunkPlace before(const ChunkPlace& place) {
        return {place.b, place.h, place.chunk - 1, C::kChunk, place.part - 1};
    }

private:
    // Rows of the chunk to shared memory; what has no step is zero.
    template <int Width, int CopyBytes, class X>
    static KGEN_DEVICE void copy(X* tile, int tile_stride, const Rows<const X>& rows,
                                 const ChunkPlace& place) {
        copy_rows<X, C::kChunk, Width, CopyBytes, kThreads>(
            tile, tile_stride, place.steps(rows), place.first(C::kChunk), place.left);
    }

    KGEN_DEVICE void write_values() const {
        // Two values of a lane share what is read of pairs, if all warps have work all the same.
        constexpr int kCount = kSubs * ceil_div(kValues, 2 * kWarpSize) >= kWarps ? 2 : 1;
        constexpr int kParts = ceil_div(kValues, kCount * kWarpSize);
        const int rank = read_thread_rank();
        const ChunkPlace place = *kept_;
#pragma unroll 1
        for (int unit = rank / kWarpSize; unit < kSubs * kParts; unit += kWarps) {
            const int sub = unit / kParts;
            const int value = unit % kParts * kCount * kWarpSize + rank % kWarpSize;
            const auto there = [&](int i) {
                return C::kV % (kCount * kWarpSize) == 0 || value + i * kWarpSize < C::kV;
            };
            const T* rows = at_.rows_of(at_.g, sub) + value;
            float g[kCount][kSubSteps];
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int s = 0; s < kSubSteps; ++s)
                    g[i][s] = there(i) ? to_float(rows[s * kRowStride + i * kWarpSize]) : 0.0f;
            const float* carried = at_.of_k + sub * Memory::kWideSub + value;
            const int left = place.left - sub * kSubSteps;
            T* gv = place.steps(tensors_.gv).at(place.first(C::kChunk) + sub * kSubSteps) + value;
            const float* sums = at_.sums + sub * Memory::kSums;
            read_pairs(
                sums, sums + Memory::kGroups * kPairsPadded, g, scale_,
                [&](int s, int i) {
                    return there(i) ? carried[s * Memory::kWideStride + i * kWarpSize] : 0.0f;
                },
                [&](int s, int i, float sum) {
                    const T of_value = from_float<T>(sum);
                    if (s < left && there(i)) gv[i * kWarpSize] = of_value;
                    if (i + 1 == kCount) gv += tensors_.gv.of_t;
                });
        }
    }

    const ChunkTensors<T, W, U>& tensors_;
    ChunkPlace* kept_;
    float scale_;
    Memory at_;
};

// All chunks of a head from the last one to the first, by one block that carries the gradient of
// the state. Between two chunks it lies in `gradients`, one state per head: pairs take all
// registers. A thread reads what it has written itself, so that needs no barrier.
template <class C, class T, class W, class U>
KGEN_DEVICE void find_all_chunks(const ChunkTensors<T, W, U>& tensors, ChunkPlace place,
                                 ChunkPlace* kept, const float* states, float* gradients,
                                 const float* gfinal_state, float* ginitial_state,
                                 float* gu_parts, float* gw_parts, float scale) {
    using Tile = typename ChunkWalk<C>::Tile;
    using Gradients = ChunkGradients<C, U>;
    const auto own = [&] { return gradients + C::state_offset(blockIdx.x, 1, 0); };
    const int key0 = read_thread_rank() / kWarpSize * 16;
    Tile last;
    last.clear();
    if (gfinal_state != nullptr)
        last.load_rows(gfinal_state + i64{key0} * C::kV, C::kV, C::kK - key0, C::kV);
    last.store_fragments(own(), C::kTiles);
    Gradients(tensors, kept, scale).clear_padding();
    if (place.chunk >= 0) Gradients(tensors, kept, scale).copy_keys(place);
    if constexpr (C::kOverlap) wait_for_earlier_kernel(states);
    // Blocks that share an SM go through the same phases, each of which wants other units: in step they
    // would stay in step.
    if constexpr (C::kStagger > 0)
        if (static_cast<int>(blockIdx.x) >= multiprocessors()) let_cycles_pass(1000 * C::kStagger);
#pragma unroll 1
    while (place.chunk >= 0) {
        Gradients(tensors, kept, scale)
            .find(place, states + C::state_offset(0, 0, place.part), own(), gu_parts, gw_parts);
        place = Gradients::before(*kept);
        sync_block();  // before copies of the next chunk, and its place, come where this one's are
    }
    if (ginitial_state != nullptr) {
        const int key0 = read_thread_rank() / kWarpSize * 16;  // again: nothing lives that long
        Tile first;
        first.load_fragments(own());
        first.store_rows(ginitial_state + i64{key0} * C::kV, C::kV, C::kK - key0, C::kV);
    }
}

}  // namespace kgen::wkv
