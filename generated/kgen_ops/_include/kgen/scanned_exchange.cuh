// States before the segments of a group's blocks (segment_walk.cuh), by all threads of each block, with two
// barriers of the group a round (meeting.cuh).
//
//     sums, in fp32      to global memory, where each block scans its part of a state over the segments
//     states, as T       from there through global memory to the block whose segment they are before
//
// Behind the first barrier the sums are there, behind the second one the states. A block reads its state
// behind the second one, and the next round's are written only behind the first one of the next round, at
// which it arrives with its products done. Sums of the next round are written behind the second barrier, to
// which all come with theirs read.
#pragma once

#include "async.cuh"
#include "block.cuh"
#include "chunk_rows.cuh"
#include "math.cuh"
#include "meeting.cuh"
#include "memory.cuh"
#include "registers.cuh"
#include "segment_ends.cuh"
#include "state_tile.cuh"

namespace kgen {

// States and sums lie in units of 16 x 16 values, so that a warp writes whole lines: of a sum [two
// tiles][lanes] [four accumulators], of a state [16][16].
//
// Keys, Values: the tensors' features; Slice: value features of a block; Threads: of a block; Begins: whether
// there is a state before the first step. Room: where in dynamic shared memory kRoomBytes are free.
template <class T, int Keys, int Values, int Slice, int Threads, int Blocks, bool Begins, int Room>
class ScannedExchange {
    using Ends = SegmentEnds<Keys, Values>;
    static constexpr int kUnit = 256;  // elements
    static constexpr int kAlong = Slice / 16;  // units of a row of them
    static constexpr int kUnits = whole_fragments(Keys) / 16 * kAlong;
    static constexpr int kSum = kUnits * kUnit;
    static constexpr int kWarps = Threads / kWarpSize;
    static constexpr int kUnitsOfBlock = (kUnits + Blocks - 1) / Blocks;  // that it scans
    static constexpr int kUnitsPerWarp = (kUnitsOfBlock + kWarps - 1) / kWarps;
    static constexpr int kAtOnce = min(Blocks, 8);  // sums that a scan reads at once
    // Who arrives and waits for the block: one warp while sums are on their way, another while states are.
    static constexpr int kSumWaiter = 0, kStateWaiter = kWarps - 1;

public:
    // Vec<float, 4> [kUnitsPerWarp][2][Threads], which the threads carry from one scan to the next.
    static constexpr int kRoomBytes = 32 * Threads * kUnitsPerWarp;

    // Where a value of a state is left.
    static KGEN_DEVICE int offset(int key, int value) {
        return (key / 16 * kAlong + value / 16) * kUnit + key % 16 * 16 + value % 16;
    }

    // sums: [groups][Blocks][kSum]; states: the same.
    KGEN_DEVICE ScannedExchange(const GroupPlace& place, i32* counters, float* sums, T* states)
        : barrier_(counters, place.group),
          sums_(sums + place.group * Blocks * kSum),
          states_(states + place.group * Blocks * kSum),
          rank_(place.rank) {}

    KGEN_DEVICE int rank() const { return rank_; }

    // What follows is called by all threads, in this order; what is once a round, from put() to take().
    KGEN_DEVICE void begin(const Ends& ends) const {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                carried(i, j / 4)[j % 4] =
                    Begins ? ends.first(key_of(unit, j), value_of(unit, j)) : 0.0f;
        });
    }

    // The lane's part of a tile of the block's sum.
    KGEN_DEVICE void put(int across, int along, int tile, const Vec<float, 4>& four) const {
        store_vec<Cache::evict_last>(part_of(rank_, across * kAlong + along, tile), four);
    }

    // The sums are written; they are there; and the same of states.
    KGEN_DEVICE void sums_written() const { barrier_.template arrive<Threads>(kSumWaiter); }
    KGEN_DEVICE void wait_for_sums() { barrier_.wait(kSumWaiter); }
    KGEN_DEVICE void states_written() const { barrier_.template arrive<Threads>(kStateWaiter); }
    KGEN_DEVICE void wait_for_states() { barrier_.wait(kStateWaiter); }

    // Between sums and states: add the segments' sums in order, and give each segment the state before it.
    KGEN_DEVICE void scan() const {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int first = 0; first < Blocks; first += kAtOnce) {
                Vec<float, 4> parts[kAtOnce][2];  // all on their way at once
#pragma unroll
                for (int block = 0; block < kAtOnce; ++block)
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile)
                        parts[block][tile] = load_vec<4>(part_of(first + block, unit, tile));
#pragma unroll
                for (int block = 0; block < kAtOnce; ++block)
                    pass_on(i, unit, first + block, parts[block]);
            }
        });
    }

    // The state before the block's segment; behind wait_for_states() it is whole.
    KGEN_DEVICE const T* state() const { return state_of(rank_); }

    // Wait for the states, and have the own one in `target`, from take() on: row by row, Stride apart.
    template <int Stride>
    KGEN_DEVICE void begin_to_take(T* target) {
        wait_for_states();
        // A warp copies a unit at a time. Where warps are whole rows of units, a thread's next unit is a
        // constant away.
        constexpr int kVec = 8;
        constexpr bool kRows = kWarps % kAlong == 0;
        const int first = computed_here(thread_rank() / kWarpSize), lane = computed_here(lane_id());
        const T* own = state() + first * kUnit + lane * kVec;
        target += lane / 2 * Stride + lane % 2 * kVec;
        if (kRows) target += first / kAlong * 16 * Stride + first % kAlong * 16;
#pragma unroll
        for (int i = 0; i < kUnits; i += kWarps) {
            if (kUnits % kWarps != 0 && first + i >= kUnits) break;
            const int unit = kRows ? i : first + i;
            cp_async<16>(target + unit / kAlong * 16 * Stride + unit % kAlong * 16, own + i * kUnit);
        }
    }
    KGEN_DEVICE void take() const {
        cp_async_wait_all();
        sync_block();
    }

    // The state behind the last step.
    KGEN_DEVICE void hand_out_end(const Ends& ends) const {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                ends.store_last(key_of(unit, j), value_of(unit, j), carried(i, j / 4)[j % 4]);
        });
    }

private:
    // body(i, unit) for the units that the warp scans.
    template <class Body>
    KGEN_DEVICE void for_my_units(Body body) const {
        const int warp = computed_here(thread_rank()) / kWarpSize;  // registers are for the sums
#pragma unroll
        for (int i = 0; i < kUnitsPerWarp; ++i) {
            const int unit = rank_ + Blocks * (warp + i * kWarps);
            if (kUnits % (Blocks * kWarps) == 0 || unit < kUnits) body(i, unit);
        }
    }

    // Features of value j of a lane, of eight: of four accumulators of one tile, then of its neighbour.
    using Unit = StateTile<T, 1, 1, 16>;
    static KGEN_DEVICE int key_of(int unit, int j) {
        return unit / kAlong * 16 + Unit::key_of(0, j % 4);
    }
    static KGEN_DEVICE int value_of(int unit, int j) {
        return unit % kAlong * 16 + Unit::value_of(j / 4, j % 4);
    }

    // The lane's part of a tile of a segment's sum.
    KGEN_DEVICE float* part_of(int block, int unit, int tile) const {
        return sums_ + block * kSum + unit * kUnit + tile * 128 + 4 * lane_id();
    }

    KGEN_DEVICE T* state_of(int rank) const { return states_ + rank * kSum; }

    // Leave the state before a segment, and add the segment's sum.
    KGEN_DEVICE void pass_on(int i, int unit, int block, const Vec<float, 4> (&part)[2]) const {
        constexpr int kEightRows = 8 * 16;  // elements
        Vec<float, 4>& left = carried(i, 0);
        Vec<float, 4>& right = carried(i, 1);
        T* there = state_of(block) + offset(unit / kAlong * 16 + mma_lane().g,
                                            unit % kAlong * 16 + column_of_quad());
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<Vec<u32, 2>*>(there + half * kEightRows) =
                quad_of_row<T>(left.data, right.data, half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            left[j] += part[0][j];
            right[j] += part[1][j];
        }
    }

    // The state before the next segment to be added, of the lane's part of the warp's unit i.
    static KGEN_DEVICE Vec<float, 4>& carried(int i, int tile) {
        return reinterpret_cast<Vec<float, 4>*>(dynamic_smem<char>() + Room)
            [(2 * i + tile) * Threads + thread_rank()];
    }

    GroupBarrier<Blocks> barrier_;
    float* sums_;  // of the group, as are the states
    T* states_;
    int rank_;
};

}  // namespace kgen
