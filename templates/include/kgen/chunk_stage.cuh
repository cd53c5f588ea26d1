// Chunks of steps of a sequence in shared memory: rows of features, one per step.
//
// A row of `Features` values is padded to a whole number of fragments, and rows lie so far apart that
// the fragments of chunk_mma.cuh meet no bank twice. Padding and rows behind the last step are zeros.
#pragma once

#include "async.cuh"
#include "memory.cuh"

namespace kgen {

// One tensor of a sequence: row t begins at rows + t * stride. A walk backwards in time passes the
// last row and a negative stride.
template <class T>
struct StepRows {
    T* rows;
    i64 stride;

    KGEN_DEVICE T* at(i64 step) const { return rows + step * stride; }

    KGEN_DEVICE StepRows from(int feature) const { return StepRows{rows + feature, stride}; }

    KGEN_DEVICE StepRows reversed(i64 steps) const {
        return StepRows{rows + (steps - 1) * stride, -stride};
    }
};

// Elements between two rows in shared memory, for rows of `width` values. fp32: 8 or 24 banks more
// than a multiple of 32, so that four rows of eight words, or four rows of four pairs, are 32
// different banks. 16 bits: an odd multiple of 16 bytes, as ldmatrix wants its eight rows. One
// formula does for both.
template <class T>
KGEN_DEVICE constexpr int chunk_row_stride(int width) {
    return (width + 7) / 16 * 16 + 8;
}

// By the whole block: start the copies of `Rows` steps from `first` on, `Width` values each, into
// `tile`. Steps from `end` on are zeros. `width` <= Width values of a row exist (the others are left
// as they are); it is a multiple of what one copy moves.
template <int Rows, int Width, int CopyBytes, int Threads, class T>
KGEN_DEVICE void stage_steps(T* tile, int tile_stride, StepRows<const T> source, i64 first,
                             i64 end, int width) {
    constexpr int kVec = CopyBytes / static_cast<int>(sizeof(T));
    constexpr int kPerRow = (Width + kVec - 1) / kVec;
    constexpr int kCopies = Rows * kPerRow;
    constexpr int kSweeps = (kCopies + Threads - 1) / Threads;
    const int rank = thread_rank();
#pragma unroll
    for (int sweep = 0; sweep < kSweeps; ++sweep) {
        const int copy = sweep * Threads + rank;
        if ((sweep + 1) * Threads > kCopies && copy >= kCopies) break;
        const int row = copy / kPerRow, column = copy % kPerRow * kVec;
        if (column >= width) continue;
        const bool inside = first + row < end;
        const T* from = inside ? source.at(first + row) + column : source.rows;
        T* to = tile + row * tile_stride + column;
        if constexpr (CopyBytes >= 4) {
            cp_async_or_zero<CopyBytes>(to, from, inside);
        } else {  // no copy moves less than 4 bytes; whoever waits for the others sees this one
            *to = inside ? *from : from_float<T>(0.0f);
        }
    }
}

}  // namespace kgen
