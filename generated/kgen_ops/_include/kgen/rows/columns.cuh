// Column sums of a matrix of partial sums, in a fixed order: the second step of a deterministic reduction whose first
// step writes one row per block.
//
// Shared memory (static): float sums[RowLanes][32]. Synchronisation: one block barrier.
#pragma once

#include "kgen/primitives/block.cuh"

namespace kgen {

// Sums 32 columns of `partial` [rows, columns] with 32 x `RowLanes` threads. Threads with threadIdx.x < 32 get the
// sum of column blockIdx.x * 32 + threadIdx.x. Each row of threads adds every RowLanes-th row of the matrix; then the
// results are added in order. Called by the whole block.
//
//     const float sum = column_sum<16>(partial, rows, columns);
//     if (threadIdx.x < 32 && column < columns) out[column] = sum;
template <int RowLanes>
KGEN_DEVICE float column_sum(const float* partial, i64 rows, i64 columns) {
    __shared__ float sums[RowLanes][kWarpSize];
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int first = static_cast<int>(threadIdx.x) / kWarpSize;
    const i64 column = static_cast<i64>(blockIdx.x) * kWarpSize + lane;
    float sum = 0.0f;
    if (column < columns) {
        // Eight loads are issued before the first addition. Additions are in the order of the rows.
        constexpr int kAhead = 8;
        i64 row = first;
        // untested: one SM, as on the host, has fewer partial rows
        for (; row + (kAhead - 1) * RowLanes < rows; row += kAhead * RowLanes) {
            float ahead[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                ahead[i] = partial[(row + i * RowLanes) * columns + column];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) sum += ahead[i];
        }
        for (; row < rows; row += RowLanes) sum += partial[row * columns + column];
    }
    sums[first][lane] = sum;
    sync_block();
    float total = 0.0f;
    if (first == 0) {
#pragma unroll
        for (int i = 0; i < RowLanes; ++i) total += sums[i][lane];
    }
    return total;
}

}  // namespace kgen
