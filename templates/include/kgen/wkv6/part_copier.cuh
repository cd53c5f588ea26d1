// Asynchronous copies of a tensor's rows by one warp: first tile after tile of 16 columns of 16 steps, then later
// steps. The tiles are those of kgen/wkv7/tile_copier.cuh, but a lane's offsets stay in registers here, which saves
// twelve instructions per copy of a lane. With `kFew` a lane has at most two copies per tile.
//
// Synchronisation: the caller commits, waits, and calls sync_warp before the warp reads the tile.
#pragma once

#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/tile_copier.cuh"

namespace kgen::wkv6 {

// Vec: elements per copy, at most 16 bytes.
template <class T, int Vec>
class PartCopier {
    using Tile = wkv7::TileCopier<T, Vec>;
    static constexpr int kVec = min(Vec, 16 / static_cast<int>(sizeof(T)));
    static constexpr int kPerRow = 16 / kVec, kCopies = ceil_div(16 * kPerRow, kWarpSize);
    static constexpr int kRows = kWarpSize / kPerRow;  // that all lanes copy at once; 16 or 8 if kFew
    static constexpr bool kFew = kCopies <= 2;
    static constexpr int kPlaces = kFew ? kCopies : 1;

public:
    static constexpr int kElements = Tile::kElements;  // 16-bit values of a tile

    KGEN_DEVICE explicit PartCopier(const StepPointer<T>& rows)
        : step_(opaque(own_step(0))),
          next_(rows.first + own_step(0) * rows.stride + own_column(0)),
          stride_(rows.stride) {
#pragma unroll
        for (int i = 0; i < kPlaces; ++i) places_[i] = opaque(Tile::place(own_step(i), own_column(i)));
    }

    // Starts the copies of columns `first` to `first` + 15. `left` steps exist, and `width` columns from `first` on.
    KGEN_DEVICE void start(u16* tiles, int left, int width, int first) const {
        if constexpr (kFew) {
#pragma unroll
            for (int i = 0; i < kCopies; ++i)
                copy(tiles + places_[i], next_ + first + i * kDistance * stride_,
                     step_ + i * kDistance < left && own_column(0) < width);
        } else {
#pragma unroll 1
            for (int i = 0; i < kCopies; ++i) {
                const int step = own_step(i), column = own_column(i);
                const i64 from = (step - own_step(0)) * stride_ + (column - own_column(0));
                const bool there = step < left && column < width;
                copy(tiles + Tile::place(step, column), there ? next_ + first + from : next_, there);
            }
        }
    }

    KGEN_DEVICE void advance(int columns, int steps) { next_ += columns + steps * stride_; }

private:
    static constexpr int kDistance = kRows / 4;  // steps from one copy of a lane to the next, if kFew

    // Step and column of the lane's copy i. Neighbouring lanes take steps that are 4 apart, which are adjacent in a
    // tile.
    static KGEN_DEVICE int own_step(int i) {
        const int row = lane_id() / kPerRow + i * kRows;
        return row % 4 * 4 + row / 4;
    }
    static KGEN_DEVICE int own_column(int) { return lane_id() % kPerRow * kVec; }

    static KGEN_DEVICE void copy(u16* to, const T* from, bool there) {
        if constexpr (sizeof(T) * kVec >= 4) {
            cp_async_or_zero<sizeof(T) * kVec>(to, from, there);
        } else {
            *to = there ? bit_cast<u16>(*from) : u16{0};
        }
    }

    int step_, places_[kPlaces];
    const T* next_;
    i64 stride_;
};

}  // namespace kgen::wkv6
