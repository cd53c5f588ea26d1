// Asynchronous copies of 16 columns of a tensor's rows by one warp, 16 steps at a time, to swizzled tiles.
//
// Layout: a 16-bit tensor has one tile of 16 x 16 16-bit values (SwizzledTile<T, 16>). An fp32 tensor has two, with
// columns 0 to 7 and 8 to 15; each of its words is two adjacent 16-bit values of a row. Elements beyond the last step
// or column are zero.
//
// Synchronisation: the caller commits, waits, and calls sync_warp before the warp reads the tile. The warps of a
// WholeRowCopier copy for each other, so that a barrier of all of them has to follow the wait.
#pragma once

#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/recurrent/recurrence.cuh"

namespace kgen::wkv7 {

// Vec: elements per copy, at most 16 bytes. D: whether chunks of 16 steps are copied in time or from the last to the
// first.
template <class T, int Vec, Direction D = Direction::forward>
class TileCopier {
    static constexpr int kVec = min(Vec, 16 / static_cast<int>(sizeof(T)));
    static constexpr int kHalves = static_cast<int>(sizeof(T)) / 2;  // 16-bit values of an element
    static constexpr int kPerRow = 16 / kVec, kCopies = ceil_div(16 * kPerRow, kWarpSize);
    static constexpr int kUnrolled = kCopies <= 2 ? kCopies : 1;  // addresses of more would spill

public:
    static constexpr int kElements = 256 * kHalves;  // 16-bit values of all tiles

    // Columns are counted from `column` on, steps from `begin` on.
    KGEN_DEVICE TileCopier(const StepPointer<T>& rows, int column, i64 begin = 0)
        : next_(rows.first + (begin + own_step(0)) * rows.stride + column + own_column(0)),
          stride_(rows.stride) {}

    // Starts the copies of columns `first` to `first` + 15 of the next 16 steps. `left` steps and `width` columns
    // exist.
    KGEN_DEVICE void start(u16* tiles, int left, int width, int first = 0) const {
#pragma unroll kUnrolled
        for (int i = 0; i < kCopies; ++i) {
            const int step = own_step(i), column = own_column(i);
            const bool there = step < left && column < width;
            const T* from = next_ + first;
            if (i > 0 && there)
                from += (step - own_step(0)) * stride_ + (column - own_column(0));
            u16* to = tiles + place(step, column);
            if constexpr (sizeof(T) * kVec >= 4) {
                cp_async_or_zero<sizeof(T) * kVec>(to, from, there);
            } else {
                *to = there ? bit_cast<u16>(*from) : u16{0};
            }
        }
    }
    KGEN_DEVICE void advance() { next_ += (D == Direction::forward ? 16 : -16) * stride_; }

    // The offset of an element in the tiles, in 16-bit values.
    static KGEN_DEVICE int place(int step, int column) {
        const int half = column * kHalves;
        return half / 16 * 256 + SwizzledTile<bf16, 16>::offset(step, half % 16 / 8) + half % 8;
    }

private:
    // Step and column of the lane's copy i. Neighbouring lanes take steps that are 4 apart, which are adjacent in a
    // tile.
    static KGEN_DEVICE int own_step(int i) {
        const int row = (lane_id() + i * kWarpSize) / kPerRow;
        return row % 4 * 4 + row / 4;
    }
    static KGEN_DEVICE int own_column(int i) {
        return (lane_id() + i * kWarpSize) % kPerRow * kVec;
    }

    const T* next_;
    i64 stride_;
};

// Fills the same tiles by copies of whole rows of the tensor, by Warps warps with PerWarp tiles each: tile t of a row
// is tile t / Warps of warp t % Warps.
//
// A warp's copies of 16 bytes take a cycle of shared memory for each pair of a line of 128 bytes that they read and a
// line that they write. That is 16 cycles, as with TileCopier, because the tiles of a row lie in different lines; only
// the number of lines read is smaller. For the pieces of a row to go to different banks, the tiles of neighbouring
// warps have to be 32 bytes more than a multiple of 128 bytes apart.
//
// WarpStride, TileStride: 16-bit values from a warp's first tile to the next warp's, and between tiles of a warp.
template <class T, int Vec, int Warps, int PerWarp, int WarpStride, int TileStride, Direction D = Direction::forward>
class WholeRowCopier {
    static constexpr int kVec = min(Vec, 16 / static_cast<int>(sizeof(T)));
    static constexpr int kColumns = 16 * Warps * PerWarp, kPerRow = kColumns / kVec, kThreads = kWarpSize * Warps;
    static constexpr int kCopies = 16 * kPerRow / kThreads;  // of a thread
    static constexpr int kUnrolled = kCopies <= 2 ? kCopies : 1;

public:
    // `rank`: the thread's number among the threads of all warps. Columns are counted from `column` on, steps from
    // `begin` on.
    KGEN_DEVICE WholeRowCopier(const StepPointer<T>& rows, int column, i64 begin, int rank)
        : next_(rows.first + (begin + step(rank)) * rows.stride + column + WholeRowCopier::column(rank)),
          stride_(rows.stride),
          rank_(rank) {}

    // Starts the copies of the next 16 steps. `left` steps and `width` columns exist.
    KGEN_DEVICE void start(u16* tiles, int left, int width) const {
#pragma unroll kUnrolled
        for (int n = 0; n < kCopies; ++n) {
            const int i = rank_ + n * kThreads, at = step(i), first = column(i), tile = first / 16;
            const bool there = at < left && first < width;
            const T* from = next_;
            if (n > 0 && there) from += (at - step(rank_)) * stride_ + (first - column(rank_));
            u16* to = tiles + tile % Warps * WarpStride + tile / Warps * TileStride +
                      TileCopier<T, Vec>::place(at, first % 16);
            if constexpr (sizeof(T) * kVec >= 4) {
                cp_async_or_zero<sizeof(T) * kVec>(to, from, there);
            } else {
                *to = there ? bit_cast<u16>(*from) : u16{0};
            }
        }
    }
    KGEN_DEVICE void advance() { next_ += (D == Direction::forward ? 16 : -16) * stride_; }

private:
    static KGEN_DEVICE int step(int i) { return i / kPerRow; }
    static KGEN_DEVICE int column(int i) { return i % kPerRow * kVec; }

    const T* next_;
    i64 stride_;
    int rank_;
};

}  // namespace kgen::wkv7
