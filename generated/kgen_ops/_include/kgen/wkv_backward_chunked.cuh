// The kernels of the chunked backward pass of wkv5 and wkv6: a block's part of each.
//
//     keep_states       wkv_state_walk.cuh: states and their gradients at the ends of chunks
//     chunk_gradients   wkv_chunk_gradients.cuh: everything else, all chunks side by side or
//                       those of a head one after the other
//     sum_chunks        sums over batch and chunks, in a fixed order
#pragma once

#include "wkv_chunk_gradients.cuh"
#include "wkv_state_walk.cuh"

namespace kgen::wkv {

// A block per head, direction and slice of the values; forward alone if C::kCarry.
template <class C, class T, class W>
KGEN_DEVICE void keep_states(i64 steps, i64 H, Rows<const T> gy, Rows<const T> r, Rows<const T> k,
                             Rows<const T> v, Rows<const W> w, const float* initial_state,
                             const float* gfinal_state, float* ginitial_state, float* states,
                             float* gradients, float scale) {
    if constexpr (C::kOverlap) let_next_kernel_start();
    constexpr int kSlices = ceil_div(C::kV, C::kSlice), kDirections = C::kCarry ? 1 : 2;
    const i64 block = blockIdx.x, head = block / (kDirections * kSlices), b = head / H,
              h = head % H;
    const bool backward = block / kSlices % kDirections != 0;
    const int value = static_cast<int>(block % kSlices) * C::kSlice;
    const int width = min(C::kV - value, C::kSlice);
    const i64 chunks = ceil_div(steps, i64{C::kChunk});
    const i64 state = head * C::kK * C::kV + value;
    const i64 kept = C::state_offset(head, chunks, 0) + value / 8 * kWarpSize * 4;
    const i64 kept_stride = C::state_offset(0, 1, 1) - C::state_offset(0, 1, 0);
    const int kept_tiles = min(C::kTiles - value / 8, C::kSlice / 8);
    const auto rows = [&](const Rows<const T>& tensor, int feature) {
        const Rows<const T> its = tensor.head(b, h);
        return StepRows<const T>{its.first + feature, its.of_t};
    };
    const Rows<const W> w_h = w.head(b, h);
    const StepRows<const W> steps_w{w_h.first, w_h.of_t};

    if (!C::kCarry && backward) {
        StateWalk<C>{rows(r, 0), rows(gy, value), steps_w, steps, width, scale}
            .template walk<true>(gfinal_state ? gfinal_state + state : nullptr, gradients + kept,
                                 kept_stride, kept_tiles,
                                 ginitial_state ? ginitial_state + state : nullptr);
    } else {
        StateWalk<C>{rows(k, 0), rows(v, value), steps_w, steps, width, 1.0f}
            .template walk<false>(initial_state ? initial_state + state : nullptr, states + kept,
                                  kept_stride, kept_tiles, nullptr);
    }
}

// A block per head and chunk, or per head if C::kCarry. gw if w has steps, gw_parts else.
template <class C, class T, class W, class U>
KGEN_DEVICE void chunk_gradients(i64 steps, i64 H, Rows<const T> gy, Rows<const T> r,
                                 Rows<const T> k, Rows<const T> v, Rows<const W> w, const U* u,
                                 const float* states, float* gradients,
                                 const float* gfinal_state, float* ginitial_state, Rows<T> gr,
                                 Rows<T> gk, Rows<T> gv, Rows<W> gw, float* gu_parts,
                                 float* gw_parts, float scale) {
    if constexpr (C::kOverlap) let_next_kernel_start();
    // A grid is less than 2^31 blocks: all of these are.
    const u32 chunks = static_cast<u32>(ceil_div(steps, i64{C::kChunk}));
    const u32 heads = static_cast<u32>(H), head = C::kCarry ? blockIdx.x : blockIdx.x / chunks;
    const u32 chunk = C::kCarry ? chunks - 1 : blockIdx.x % chunks;
    const i64 left = steps - static_cast<i64>(chunk) * C::kChunk;
    const ChunkPlace place{static_cast<int>(head / heads), static_cast<int>(head % heads),
                           static_cast<int>(chunk), static_cast<int>(min(left, i64{C::kChunk})),
                           static_cast<int>(head * chunks + chunk)};
    __shared__ ChunkPlace kept;
    const ChunkTensors<T, W, U> tensors{gy, r, k, v, w, u, gr, gk, gv, gw};
    if constexpr (C::kCarry) {
        const i64 state = i64{head} * C::kK * C::kV;
        find_all_chunks<C>(tensors, place, &kept, states, gradients,
                           gfinal_state ? gfinal_state + state : nullptr,
                           ginitial_state ? ginitial_state + state : nullptr, gu_parts, gw_parts,
                           scale);
    } else {
        const i64 offset = C::state_offset(head, chunks, chunk);
        ChunkGradients<C, U> gradients_of(tensors, &kept, scale);
        gradients_of.clear_padding();
        gradients_of.find(place, states + offset, gradients + offset, gu_parts, gw_parts);
    }
}

// Sums over batch and chunks of [B, H, chunks, K], always in the same order; `block` is of 8 of H * K
// features: a warp reads as many of four parts at a time. Overlap: the kernel that makes the parts may
// still run.
template <int Threads, bool Overlap, class T>
KGEN_DEVICE void sum_chunks(i64 block, const float* parts, i64 B, i64 H, i64 K, i64 chunks,
                            T* sums) {
    constexpr int kFeatures = 8, kRows = Threads / kFeatures, kEach = kWarpSize / kFeatures;
    static_assert(kRows % kEach == 0, "whole warps");
    __shared__ float of_rows[kRows][kFeatures];
    const int row = thread_rank() / kFeatures, column = thread_rank() % kFeatures;
    const i64 feature = block * kFeatures + column;
    const bool used = feature < H * K;
    if constexpr (Overlap) wait_for_earlier_kernel(parts);
    CompensatedSum sum;
    if (used) {
        const i64 h = feature / K, key = feature % K;
        const u32 of_batch = static_cast<u32>(chunks), all = static_cast<u32>(B * chunks);
#pragma unroll 8
        for (u32 i = row; i < all; i += kRows)
            sum.add(parts[((i / of_batch * H + h) * chunks + i % of_batch) * K + key]);
    }
    of_rows[row][column] = sum.value();
    sync_block();
    if (thread_rank() < kWarpSize) {
        CompensatedSum all;
#pragma unroll 4
        for (int i = row; i < kRows; i += kEach) all.add(of_rows[i][column]);
        float total = all.value();
#pragma unroll
        for (int lanes = kFeatures; lanes < kWarpSize; lanes *= 2) total += shfl_xor(total, lanes);
        if (row == 0 && used) sums[feature] = from_float<T>(total);
    }
}

}  // namespace kgen::wkv
