// What a block adds up of the parts before its segment, ahead of its walk.
#pragma once

#include "block.cuh"
#include "memory.cuh"

namespace kgen {

// to[row][column] = initial[row][column] + the parts there, in order: `batches` times Together of
// them, `part_stride` values apart. Rows are Stride values apart, and have the first `columns` of
// Columns. `initial` may be null, for zeros, and begin anywhere; `to`, parts and `columns` are
// multiples of four values where Stride is. By all Threads of a block; others read behind a barrier.
//
// The loads of Together parts, for several rows, wait together.
template <int Together, int Rows, int Columns, int Stride, int Threads>
KGEN_DEVICE void add_parts(float* to, const float* initial, const float* parts, int part_stride,
                           int batches, int columns) {
    constexpr int kWidth = Stride % 4 == 0 ? 4 : 1;
    constexpr int kVectors = Columns / kWidth;   // in a row
    constexpr int kStep = Threads / kVectors;    // rows at once
    constexpr int kInFlight = 64;                // registers; the walk needs more later on
    constexpr int kHeld = min(max(1, kInFlight / (kWidth * Together)), (Rows + kStep - 1) / kStep);
    static_assert(Columns % kWidth == 0 && Threads % kVectors == 0, "a thread has one column");
    using Values = Vec<float, kWidth>;
    const int column = thread_rank() % kVectors * kWidth;
    if (column >= columns) return;
#pragma unroll 1
    for (int row = thread_rank() / kVectors; row < Rows; row += kHeld * kStep) {
        const auto is_row = [&](int i) {
            return Rows % (kHeld * kStep) == 0 || row + i * kStep < Rows;
        };
        const int offset = row * Stride + column;
        Values sums[kHeld];
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
#pragma unroll
            for (int j = 0; j < kWidth; ++j)
                sums[i][j] = initial != nullptr && is_row(i)
                                 ? initial[offset + i * kStep * Stride + j] : 0.0f;
        const float* part = parts + offset;
#pragma unroll 1
        for (int batch = 0; batch < batches; ++batch) {
            Values loaded[Together][kHeld];
#pragma unroll
            for (int k = 0; k < Together; ++k, part += part_stride)
#pragma unroll
                for (int i = 0; i < kHeld; ++i)
                    if (is_row(i)) loaded[k][i] = load_vec<kWidth>(part + i * kStep * Stride);
#pragma unroll
            for (int k = 0; k < Together; ++k)
#pragma unroll
                for (int i = 0; i < kHeld; ++i)
#pragma unroll
                    for (int j = 0; j < kWidth; ++j)
                        if (is_row(i)) sums[i][j] += loaded[k][i][j];
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            if (is_row(i)) store_vec(to + offset + i * kStep * Stride, sums[i]);
    }
}

}  // namespace kgen
