// Asynchronous copies of rows of up to 64 columns to panels in shared memory (wgmma.cuh), 32 steps at a time.
//
// Layout: 16-bit elements go to a panel, fp32 to rows of 64 without swizzle. Elements beyond the last step or column
// are zero.
//
// Synchronisation: the caller commits and waits, and synchronises the reading threads with the copying threads.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/recurrent/recurrence.cuh"
#include "kgen/wkv7/group_tiles.cuh"

namespace kgen::wkv7 {

// Copies `Rows` rows of each chunk by Threads threads, chunk after chunk in direction D. Vec: elements per copy, at
// most 16 bytes.
template <class T, int Vec, int Rows, int Threads, Direction D = Direction::forward>
class GroupCopier {
    static constexpr int kVec = min(Vec, 16 / static_cast<int>(sizeof(T)));
    static constexpr int kPerRow = GroupTiles::kColumns / kVec, kCopies = Rows * kPerRow / Threads;
    static constexpr int kSweep = Threads / kPerRow;  // rows that all threads copy at once; 0: less than one row
    static constexpr bool kWholeRows = kSweep > 0;  // row = n * kSweep + rest: n and rest in separate bits
    static constexpr int kUnrolled = min(kCopies, kCopies <= 8 ? 4 : 1);  // the addresses of more would spill

public:
    // `rank`: the thread's number. The rows of the first chunk begin at step `begin`.
    KGEN_DEVICE GroupCopier(const StepPointer<T>& rows, i64 begin, int rank)
        : next_(rows.first + (begin + row(rank)) * rows.stride + column(rank)), stride_(rows.stride), rank_(rank) {}

    // Starts the copies of a chunk's rows, and advances to the next chunk. `left` rows and `width` columns exist.
    KGEN_DEVICE void start(bf16* rows, int left, int width) {
        // Opaque: otherwise offsets in panels would stay in registers. Unsigned: a signed division costs more.
        const u32 rank = static_cast<u32>(opaque(rank_));
        const int own = GroupTiles::RowPanels::offset(row(rank), column(rank) / 8) + column(rank) % 8;
#pragma unroll kUnrolled
        for (int n = 0; n < kCopies; ++n) {
            const u32 i = rank + n * Threads;
            const int at = row(i), first = column(i);
            const bool there = at < left && first < width;
            const T* from = next_;
            if (kSweep == 0) from += (at - row(rank)) * stride_ + (first - column(rank));
            T* to = place(rows, at, first);
            if constexpr (kWholeRows && sizeof(T) == 2)
                to = reinterpret_cast<T*>(rows) + (own ^ 8 * (n * kSweep % 8)) + 64 * n * kSweep;
            if constexpr (sizeof(T) * kVec >= 4) {
                cp_async_or_zero<sizeof(T) * kVec>(to, from, there);
            } else {
                *to = there ? *from : from_float<T>(0.0f);
            }
            if (kSweep > 0 && n + 1 < kCopies) next_ += kSweep * stride_;
        }
        constexpr int kAdvance = D == Direction::forward ? GroupTiles::kChunk : -GroupTiles::kChunk;
        next_ += (kAdvance - (kCopies - 1) * kSweep) * stride_;
    }

    // Where an element lies.
    static KGEN_DEVICE T* place(bf16* rows, int row, int column) {
        if constexpr (sizeof(T) == 4) return reinterpret_cast<T*>(rows) + GroupTiles::kColumns * row + column;
        return reinterpret_cast<T*>(rows) + GroupTiles::RowPanels::offset(row, column / 8) + column % 8;
    }

private:
    static KGEN_DEVICE int row(u32 i) { return static_cast<int>(i / kPerRow); }
    static KGEN_DEVICE int column(u32 i) { return static_cast<int>(i % kPerRow * kVec); }

    const T* next_;
    i64 stride_;
    int rank_;
};

}  // namespace kgen::wkv7
