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

// By the whole block: copies of one tensor's chunks, of `Rows` steps and `Width` values each, to
// shared memory, chunk after chunk. A thread copies the same columns of a row here and there, so that
// an address is one addition away from the last.
template <class T, int Rows, int Width, int CopyBytes, int Threads>
class ChunkCopier {
    static constexpr int kVec = CopyBytes / static_cast<int>(sizeof(T));
    static constexpr int kPerRow = (Width + kVec - 1) / kVec;  // copies
    static constexpr int kSweepRows = max(Threads / kPerRow, 1);
    static constexpr int kColumnSweeps = (kPerRow + Threads - 1) / Threads;

    // Whether no thread has fewer rows than another.
    static constexpr bool kEven = kColumnSweeps == 1 && Threads % kPerRow == 0 &&
                                  Rows % kSweepRows == 0;

public:
    // Begins with step `first`; `width` <= Width values of each exist, a multiple of what one copy
    // moves.
    KGEN_DEVICE ChunkCopier(StepRows<const T> source, i64 first, int width)
        : stride_(source.stride), width_(width) {
        const int rank = thread_rank();
        row_ = kColumnSweeps > 1 ? 0 : rank / kPerRow;
        column_ = (kColumnSweeps > 1 ? rank : rank % kPerRow) * kVec;
        next_ = source.at(first + row_) + column_;
        idle_ = row_ >= kSweepRows || column_ >= width;
    }

    // Start the copies of the next chunk into `tile`. Of its steps `left` exist, the others are zeros
    // there, or with !Zeros left as they are; Whole says that all do. Values that do not exist are left
    // as they are. The caller closes the group.
    template <bool Whole, bool Zeros = true>
    KGEN_DEVICE void start(T* tile, int tile_stride, int left) {
        if (!(kEven && width_ == Width) && idle_) return;
        T* to = tile + row_ * tile_stride + column_;
#pragma unroll
        for (int row = 0; row < Rows; row += kSweepRows) {
            if (!kEven && row_ + row >= Rows) break;
            const bool inside = Whole || row_ + row < left;
            if (!Zeros && !inside) break;
#pragma unroll
            for (int i = 0; i < kColumnSweeps; ++i) {
                const int column = i * Threads * kVec;
                if (kColumnSweeps > 1 && column_ + column >= width_) break;
                copy(to + row * tile_stride + column, next_ + row * stride_ + column, inside);
            }
        }
        next_ += Rows * stride_;
    }

private:
    static KGEN_DEVICE void copy(T* to, const T* from, bool inside) {
        if constexpr (CopyBytes >= 4) {
            cp_async_or_zero<CopyBytes>(to, from, inside);
        } else {  // no copy moves less than 4 bytes; whoever waits for the others sees this one
            *to = inside ? *from : from_float<T>(0.0f);
        }
    }

    const T* next_;
    i64 stride_;
    int width_, row_, column_;
    bool idle_;
};

}  // namespace kgen
