// Asynchronous copies of whole rows of 16 steps, in pieces of 16 bytes, to rows that are swizzled within 128 bytes.
//
// A warp's copies from one 128-byte line of global memory to one line of shared memory take one cycle of shared memory.
// Copies from 16 lines take 16 cycles, whatever their order in shared memory; whole rows of 128 bytes take 4 cycles for
// the same bytes. A row with parts in several lines of shared memory takes a cycle for each line, or more.
//
// Layout (InputTile): 16 rows. 16-bit values as in swizzled_tile.cuh; fp32 in rows of a multiple of 128 bytes, where
// chunk c of 16 bytes of row i lies at place c ^ 4 * (i / 2 % 2).
//
// Bank conflicts: those of swizzled_tile.cuh; none where a warp reads four columns of fp32 of rows i and i + 2.
//
// Synchronisation: the caller commits and waits, and then calls a barrier of the copying warps before they read.
#pragma once

#include "kgen/chunked/swizzled_tile.cuh"
#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/recurrent/recurrence.cuh"

namespace kgen::wkv6 {

// 16 rows of a tensor of T. A place is an offset in 16-bit values.
template <class T, int Columns>
struct InputTile {
    static constexpr bool kWide = sizeof(T) > 2;
    static constexpr int kHalves = static_cast<int>(sizeof(T)) / 2;  // 16-bit values of an element
    static constexpr int kRow = kWide         ? 64 * ceil_div(Columns, 32)
                                : Columns <= 16 ? 16
                                                : 64 * ceil_div(Columns, 64);
    static constexpr int kElements = 16 * kRow;
    using Tile = SwizzledTile<bf16, kRow>;

    static KGEN_DEVICE int place(int step, int column) {
        const int half = column * kHalves, chunk = half / 8;
        if constexpr (kWide) return step * kRow + 8 * (chunk ^ swizzle(step)) + half % 8;
        return Tile::offset(step, chunk) + half % 8;
    }
    // The place `steps` rows below a place. No bit of `steps` is set in that place's step.
    static KGEN_DEVICE int below(int place, int steps) {
        if constexpr (kWide) return (place ^ 8 * swizzle(steps)) + steps * kRow;
        return place ^ Tile::offset(steps, 0);
    }
    // The place 16 * square columns to the right of a place in the first 16 columns.
    static KGEN_DEVICE int beside(int place, int square) {
        if constexpr (kWide) return (place ^ 32 * (square % 2)) + 64 * (square / 2);
        return Tile::beside(place, square);
    }

private:
    static KGEN_DEVICE int swizzle(int step) { return step / 2 % 2 * 4; }
};

// Steps in chunks of 16, without 64-bit arithmetic in a loop.
class ChunkLengths {
    int full_, last_;  // number of chunks of 16 steps; steps of the chunk after them

public:
    KGEN_DEVICE explicit ChunkLengths(i64 steps)
        : full_(static_cast<int>(steps / 16)), last_(static_cast<int>(steps % 16)) {}

    KGEN_DEVICE int of(int chunk) const { return chunk < full_ ? 16 : chunk == full_ ? last_ : 0; }
};

// Runs on Warps warps; Columns: of a row, which has at most 512 bytes.
template <class T, int Columns, int Warps = 1>
class RowCopier {
    using Tile = InputTile<T, Columns>;
    static constexpr int kVec = 16 / static_cast<int>(sizeof(T)), kPieces = ceil_div(Columns, 16) * (16 / kVec);
    static constexpr int kThreads = Warps * kWarpSize;
    static_assert(kPieces <= 32 && (Tile::kRow & (Tile::kRow - 1)) * (Tile::kWide ? 0 : 1) == 0,
                  "a row is copied at once, and bits of rows and columns are apart");

    // Lanes that share a row, 2 to 32, and rows that are copied at once.
    static constexpr int kLanes = kPieces <= 2 ? 2 : kPieces <= 4 ? 4 : kPieces <= 8 ? 8 : kPieces <= 16 ? 16 : 32;
    static constexpr int kRoom = kThreads / kLanes;
    static constexpr int kRows = kRoom >= 16 ? 16 : kRoom >= 8 ? 8 : kRoom >= 4 ? 4 : kRoom >= 2 ? 2 : 1;

public:
    static constexpr int kCopies = 16 / kRows;  // of a lane

    // rank: the thread's number among the threads of the warps. `width` columns exist.
    KGEN_DEVICE explicit RowCopier(const StepPointer<T>& rows, int rank = lane_id(), int width = Columns)
        : next_(rows.first + step_at(rank) * rows.stride + column_at(rank)),
          stride_(rows.stride),
          place_(place_at(rank)),
          first_(column_at(rank) < width ? step_at(rank) : 16),
          used_(is_used(rank)) {}

    // Step, first column and place in the tile of a thread's copy i. The columns may lie beyond the row.
    static KGEN_DEVICE int step_at(int rank, int i = 0) { return rank / kLanes + kRows * i; }
    static KGEN_DEVICE int column_at(int rank) { return rank % kLanes * kVec; }
    static KGEN_DEVICE int place_at(int rank, int i = 0) {
        return Tile::below(Tile::place(step_at(rank), column_at(rank)), kRows * i);
    }
    // Whether the thread has a part of the rows.
    static KGEN_DEVICE bool is_used(int rank) {
        constexpr int kUsed = kRows * kLanes;
        return (kPieces == kLanes || rank % kLanes < kPieces) && (kThreads == kUsed || rank < kUsed);
    }

    // Finds the places that the lane copies to.
    KGEN_DEVICE void find(int (&places)[kCopies]) const {
#pragma unroll
        for (int i = 0; i < kCopies; ++i) places[i] = opaque(Tile::below(place_, kRows * i));
    }

    // Starts the copies of the next 16 steps, of which `left` exist; places: see find().
    KGEN_DEVICE void start(u16* tile, const int (&places)[kCopies], int left) const {
        if (!used_) return;
#pragma unroll
        for (int i = 0; i < kCopies; ++i)
            cp_async_or_zero<16>(tile + places[i], next_ + kRows * i * stride_, first_ + kRows * i < left);
    }
    KGEN_DEVICE void start(u16* tile, int left) const {
        int places[kCopies];
        find(places);
        start(tile, places, left);
    }

    KGEN_DEVICE void advance(int columns, int steps) { next_ += columns + steps * stride_; }

private:
    const T* next_;
    i64 stride_;
    int place_;
    int first_;  // the lane's first step, or 16 if its columns do not exist
    bool used_;
};

}  // namespace kgen::wkv6
