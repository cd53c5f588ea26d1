// Sums over the rows of a matrix of partial sums, always in the same order: the last step of a
// deterministic reduction whose first step left one row per block.
#pragma once

#include "block.cuh"

namespace kgen {

// 32 columns by `RowLanes` rows of threads sum 32 columns of `partial` [rows, columns]; the threads
// with threadIdx.x < 32 get the sum of column blockIdx.x * 32 + threadIdx.x. Each row of threads
// adds every RowLanes-th row of the matrix, then its results are added in turn. The whole block
// makes the call.
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
        // Eight loads before the first addition; the order of the additions is that of the rows.
        constexpr int kAhead = 8;
        i64 row = first;
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
