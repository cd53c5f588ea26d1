// Sums of partial gradients of u and w. They are always in the same order, and compensated: a plain running sum would
// lose more than the definition's sum, which is a tree.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/primitives/types.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen::wkv {

// sums[feature] = sum over sequences of parts [N, features]; one thread of the grid per feature.
template <int Threads, class T>
KGEN_DEVICE void sum_sequences(const float* parts, i64 N, i64 features, T* sums) {
    const i64 feature = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x;
    if (feature >= features) return;
    CompensatedSum sum;
    for (i64 n = 0; n < N; ++n) sum.add(parts[n * features + feature]);
    sums[feature] = from_float<T>(sum.value());
}

// sums[h, key] = sum over batch and chunks of parts [B, H, chunks, K]. Block number `block` computes 8 of the H * K
// features; a warp reads 8 features of four parts at a time. Pdl: the kernel that writes the parts may still run.
//
// Shared memory: float row_sums[Threads / 8][8].
template <int Threads, bool Pdl, class T>
KGEN_DEVICE void sum_chunks(i64 block, const float* parts, i64 B, i64 H, i64 K, i64 chunks,
                            T* sums) {
    constexpr int kFeatures = 8, kRows = Threads / kFeatures, kEach = kWarpSize / kFeatures;
    static_assert(kRows % kEach == 0, "whole warps");
    __shared__ float row_sums[kRows][kFeatures];
    const int row = thread_rank() / kFeatures, column = thread_rank() % kFeatures;
    const i64 feature = block * kFeatures + column;
    const bool used = feature < H * K;
    if constexpr (Pdl) griddepcontrol_wait(parts);
    // 1. A row of threads sums every kRows-th part.
    CompensatedSum sum;
    if (used) {
        const i64 h = feature / K, key = feature % K;
        const u32 row_chunks = static_cast<u32>(chunks), all = static_cast<u32>(B * chunks);
#pragma unroll 8
        for (u32 i = row; i < all; i += kRows)
            sum.add(parts[((i / row_chunks * H + h) * chunks + i % row_chunks) * K + key]);
    }
    row_sums[row][column] = sum.value();
    sync_block();
    // 2. The first warp sums the rows.
    if (thread_rank() < kWarpSize) {
        CompensatedSum all;
#pragma unroll 4
        for (int i = row; i < kRows; i += kEach) all.add(row_sums[i][column]);
        float total = all.value();
#pragma unroll
        for (int lanes = kFeatures; lanes < kWarpSize; lanes *= 2) total += shfl_xor(total, lanes);
        if (row == 0 && used) sums[feature] = from_float<T>(total);
    }
}

}  // namespace kgen::wkv
