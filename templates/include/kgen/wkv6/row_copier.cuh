// Asynchronous copies of whole rows of 16 steps, to tiles of 16 columns, in pieces of 16 bytes.
//
// A warp's copies from one line of global memory, 128 bytes, to different banks take one cycle of shared memory. Pieces
// of 16 rows take 16 cycles, in whatever order they lie; whole rows of 128 bytes take 4 for the same bytes.
//
// Layout: tiles as in kgen/wkv7/tile_copier.cuh, Pitch apart. Tiles of fp32 have 64 bytes between their two halves.
//
// Bank conflicts: none in a row of 128 bytes, as four neighbouring tiles or halves begin at different quarters of the
// banks; and none where a warp reads four columns of fp32 of rows i and i + 2.
//
// Synchronisation: the caller commits, waits, and then calls a barrier of the warps that copied before they read.
#pragma once

#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/tile_copier.cuh"

namespace kgen::wkv6 {

// Tiles of a tensor of T whose rows are copied as a whole.
template <class T>
struct RowTile16 {
    using Tile = SwizzledTile<bf16, 16>;
    static constexpr int kHalves = static_cast<int>(sizeof(T)) / 2;  // 16-bit values of an element
    static constexpr int kPart = Tile::kElements + 32;               // from one half of a tile of fp32 to the other
    static constexpr int kElements = kHalves == 1 ? Tile::kElements : kPart + Tile::kElements;
    static constexpr int kSkew = 16;  // to add to a multiple of 64 from tile to tile

    // The 16-bit value at which an element begins is base(column) + place(step, column).
    static KGEN_DEVICE int base(int column) { return column * kHalves / 16 * kPart; }
    static KGEN_DEVICE int place(int step, int column) {
        const int half = column * kHalves;
        return Tile::offset(step, half % 16 / 8) + half % 8;
    }
};

// Steps in chunks of 16, without 64-bit arithmetic in a loop.
class ChunkLengths {
    int full_, last_;  // chunks of 16 steps, and steps of the one behind them

public:
    KGEN_DEVICE explicit ChunkLengths(i64 steps)
        : full_(static_cast<int>(steps / 16)), last_(static_cast<int>(steps % 16)) {}

    KGEN_DEVICE int of(int chunk) const { return chunk < full_ ? 16 : chunk == full_ ? last_ : 0; }
};

// By Warps warps. Columns: of a row; Pitch: from tile to tile, in 16-bit values.
template <class T, int Columns, int Pitch, int Warps = 1>
class RowCopier {
    using Tiles = RowTile16<T>;
    static constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kPieces = ceil_div(Columns, 16) * (16 / kVec);
    static constexpr int kThreads = Warps * kWarpSize;
    static_assert(kPieces <= 32, "a row is copied at once");
    static_assert(Pitch % 64 == 16 || Pitch % 64 == 48, "rows of four tiles must lie on different banks");

    // Lanes that share a row, 2 to 32.
    static constexpr int kLanes = kPieces <= 2 ? 2 : kPieces <= 4 ? 4 : kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;
    static constexpr int kRoom = kThreads / kLanes;
    static constexpr int kRows = kRoom >= 16 ? 16 : kRoom >= 8 ? 8 : kRoom >= 4 ? 4 : kRoom >= 2 ? 2 : 1;
    // From one copy of a lane to the next, in steps. Neighbouring rows are 4 steps apart, which lie side by side.
    static constexpr int kDistance = kRows >= 4 ? kRows / 4 : kRows;

public:
    static constexpr int kCopies = 16 / kRows;  // of a lane

    // rank: of the thread among those of the warps. `width` columns exist.
    KGEN_DEVICE explicit RowCopier(const StepPointer<T>& rows, int rank = lane_id(), int width = Columns)
        : next_(rows.first + step_at(rank) * rows.stride + column_at(rank)),
          stride_(rows.stride),
          place_(Tiles::place(step_at(rank), column_at(rank) % 16)),
          base_(base_at(rank)),
          first_(column_at(rank) < width ? step_at(rank) : 16),
          used_(is_used(rank)) {}

    // Of copy i of a thread: its step, its columns, which may lie behind the row, and the 16-bit value of the tiles.
    static KGEN_DEVICE int step_at(int rank, int i = 0) {
        const int row = rank / kLanes;
        return (kRows >= 4 ? row % 4 * 4 + row / 4 : row) + kDistance * i;
    }
    static KGEN_DEVICE int column_at(int rank) { return rank % kLanes * kVec; }
    static KGEN_DEVICE int place_at(int rank, int i) {
        return base_at(rank) + Tiles::place(step_at(rank, i), column_at(rank) % 16);
    }
    // Whether the thread has a part of the rows.
    static KGEN_DEVICE bool is_used(int rank) {
        constexpr int kUsed = kRows * kLanes;
        return (kPieces == kLanes || rank % kLanes < kPieces) && (kThreads == kUsed || rank < kUsed);
    }

    // To which 16-bit values of the tiles the lane copies.
    KGEN_DEVICE void find(int (&places)[kCopies]) const {
#pragma unroll
        for (int i = 0; i < kCopies; ++i)  // no bit of kDistance * i is set in the lane's first step
            places[i] = opaque(base_ + (place_ ^ Tiles::Tile::offset(kDistance * i, 0)));
    }

    // Starts the copies of the next 16 steps, of which `left` exist; places: see find().
    KGEN_DEVICE void start(u16* tiles, const int (&places)[kCopies], int left) const {
        if (!used_) return;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            cp_async_or_zero<16>(tiles + places[i], next_ + kDistance * i * stride_, first_ + kDistance * i < left);
    }
    KGEN_DEVICE void start(u16* tiles, int left) const {
        int places[kCopies];
        find(places);
        start(tiles, places, left);
    }

    KGEN_DEVICE void advance(int columns, int steps) { next_ += columns + steps * stride_; }

private:
    static KGEN_DEVICE int base_at(int rank) {
        return column_at(rank) / 16 * Pitch + Tiles::base(column_at(rank) % 16);
    }

    const T* next_;
    i64 stride_;
    int place_, base_;
    int first_;  // the lane's first step, or 16 if its columns do not exist
    bool used_;
};

}  // namespace kgen::wkv6
