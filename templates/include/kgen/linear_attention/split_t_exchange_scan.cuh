// The exchange of split_t (split_t_loop.cuh) by all threads of each CTA: a scan over the segments.
//
// Computes, per round, the state before the segment of each CTA of a head from the sums of all segments:
//
//     1. Each CTA writes the sum of its segment, in fp32, to global memory.
//     2. Each CTA scans its share of the elements over all segments: it adds the sums in order and writes the
//        state before each segment, as T, to global memory.
//     3. Each CTA copies the state before its own segment to shared memory.
//
// Layout: sums and states consist of units of 16 x 16 elements, so that a warp writes whole cache lines: of a
// sum [2 tiles of 8 values][lanes][4 accumulators], of a state [16 keys][16 values].
//
// Shared memory: Vec<float, 4> [kUnitsPerWarp][2][Threads] at ScratchOffset, the state that each thread carries
// from one round to the next.
//
// Synchronisation: two grid barriers per round (grid_barrier.cuh), after steps 1 and 2. Why that is enough:
//     - A CTA writes sums of the next round after the second barrier; all CTAs have read the sums before it.
//     - A CTA writes states of the next round after the first barrier of that round, where every CTA arrives
//       only after it has used its state of this round.
#pragma once

#include "kgen/primitives/cp_async.cuh"
#include "kgen/primitives/block.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/grid_barrier.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/chunked/segment_ends.cuh"
#include "kgen/chunked/chunk_states.cuh"

namespace kgen {

// Keys, Values: features of the tensors; BlockV: value features of a CTA; Threads, Ctas: threads of a CTA and
// CTAs of a head; ScratchOffset: where kScratchBytes of dynamic shared memory are free.
template <class T, int Keys, int Values, int BlockV, int Threads, int Ctas, bool HasInitialState,
          int ScratchOffset>
class ScanExchange {
    using Ends = SegmentEnds<Keys, Values>;
    static constexpr int kUnit = 256;  // elements
    static constexpr int kValueUnits = BlockV / 16;  // units side by side
    static constexpr int kUnits = whole_fragments(Keys) / 16 * kValueUnits;
    static constexpr int kSum = kUnits * kUnit;
    static constexpr int kWarps = Threads / kWarpSize;
    static constexpr int kUnitsOfCta = (kUnits + Ctas - 1) / Ctas;  // units that it scans
    static constexpr int kUnitsPerWarp = (kUnitsOfCta + kWarps - 1) / kWarps;
    static constexpr int kAtOnce = min(Ctas, 8);  // sums that a scan reads at once
    // The warps that arrive and wait at the grid barrier for the CTA: one for sums, another for states.
    static constexpr int kSumWaiter = 0, kStateWaiter = kWarps - 1;

public:
    static constexpr int kScratchBytes = 32 * Threads * kUnitsPerWarp;

    // Offset of an element of a state.
    static KGEN_DEVICE int offset(int key, int value) {
        return (key / 16 * kValueUnits + value / 16) * kUnit + key % 16 * 16 + value % 16;
    }

    // sums, states: [heads and blocks of value features][Ctas][kSum].
    KGEN_DEVICE ScanExchange(const CtaGroup& cta, i32* counters, float* sums, T* states)
        : barrier_(counters, cta.group),
          sums_(sums + cta.group * Ctas * kSum),
          states_(states + cta.group * Ctas * kSum),
          rank_(cta.rank) {}

    KGEN_DEVICE int rank() const { return rank_; }

    // All threads call the functions from here to wait_for_state(), in this order; from put() on in every round.
    KGEN_DEVICE void load_initial_state(const Ends& ends) const {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                carried(i, j / 4)[j % 4] =
                    HasInitialState ? ends.first(key_of(unit, j), value_of(unit, j)) : 0.0f;
        });
    }

    // Writes this lane's accumulators of one tile of the CTA's sum.
    KGEN_DEVICE void put(int key_unit, int value_unit, int tile, const Vec<float, 4>& four) const {
        store_vec<Cache::evict_last>(sum_of_tile(rank_, key_unit * kValueUnits + value_unit, tile), four);
    }

    // The two grid barriers. *_written(): this CTA has written its sums, or states. wait_for_*(): all CTAs have.
    KGEN_DEVICE void sums_written() const { barrier_.template arrive<Threads>(kSumWaiter); }
    KGEN_DEVICE void wait_for_sums() { barrier_.wait(kSumWaiter); }
    KGEN_DEVICE void states_written() const { barrier_.template arrive<Threads>(kStateWaiter); }
    KGEN_DEVICE void wait_for_states() { barrier_.wait(kStateWaiter); }

    // Between the two barriers: adds the sums in order and writes the state before each segment.
    KGEN_DEVICE void scan() const {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int first = 0; first < Ctas; first += kAtOnce) {
                Vec<float, 4> sums[kAtOnce][2];  // all loads in flight at once
#pragma unroll
                for (int cta = 0; cta < kAtOnce; ++cta)
#pragma unroll
                    for (int tile = 0; tile < 2; ++tile)
                        sums[cta][tile] = load_vec<4>(sum_of_tile(first + cta, unit, tile));
#pragma unroll
                for (int cta = 0; cta < kAtOnce; ++cta)
                    reduce_carry(i, unit, first + cta, sums[cta]);
            }
        });
    }

    // The state before the CTA's segment, in global memory; valid after wait_for_states().
    KGEN_DEVICE const T* state() const { return state_of(rank_); }

    // Waits for the states and starts the copy of this CTA's state to `target`, rows Stride apart; the state is
    // there after wait_for_state().
    template <int Stride>
    KGEN_DEVICE void start_state_copy(T* target) {
        wait_for_states();
        // A warp copies one unit at a time. With kRows the address of a thread's next unit is a constant away.
        constexpr int kVec = 8;
        constexpr bool kRows = kWarps % kValueUnits == 0;
        const int first = opaque(thread_rank() / kWarpSize), lane = opaque(lane_id());
        const T* own = state() + first * kUnit + lane * kVec;
        target += lane / 2 * Stride + lane % 2 * kVec;
        if (kRows) target += first / kValueUnits * 16 * Stride + first % kValueUnits * 16;
#pragma unroll
        for (int i = 0; i < kUnits; i += kWarps) {
            if (kUnits % kWarps != 0 && first + i >= kUnits) break;
            const int unit = kRows ? i : first + i;
            cp_async<16>(target + unit / kValueUnits * 16 * Stride + unit % kValueUnits * 16, own + i * kUnit);
        }
    }
    KGEN_DEVICE void wait_for_state() const {
        cp_async_wait_all();
        sync_block();
    }

    // Writes the state after the last step.
    KGEN_DEVICE void store_final_state(const Ends& ends) const {
        for_my_units([&](int i, int unit) {
#pragma unroll
            for (int j = 0; j < 8; ++j)
                ends.store_last(key_of(unit, j), value_of(unit, j), carried(i, j / 4)[j % 4]);
        });
    }

private:
    // Calls body(i, unit) for the units that the warp scans.
    template <class Body>
    KGEN_DEVICE void for_my_units(Body body) const {
        const int warp = opaque(thread_rank()) / kWarpSize;  // opaque: the registers are for the sums
#pragma unroll
        for (int i = 0; i < kUnitsPerWarp; ++i) {
            const int unit = rank_ + Ctas * (warp + i * kWarps);
            if (kUnits % (Ctas * kWarps) == 0 || unit < kUnits) body(i, unit);
        }
    }

    // Features of element j (0 to 7) of a lane: four accumulators of one tile, then four of the next tile.
    using Unit = StateFragments<T, 1, 1, 16>;
    static KGEN_DEVICE int key_of(int unit, int j) {
        return unit / kValueUnits * 16 + Unit::key_of(0, j % 4);
    }
    static KGEN_DEVICE int value_of(int unit, int j) {
        return unit % kValueUnits * 16 + Unit::value_of(j / 4, j % 4);
    }

    // This lane's accumulators of a tile of a segment's sum.
    KGEN_DEVICE float* sum_of_tile(int cta, int unit, int tile) const {
        return sums_ + cta * kSum + unit * kUnit + tile * 128 + 4 * lane_id();
    }

    KGEN_DEVICE T* state_of(int rank) const { return states_ + rank * kSum; }

    // Writes the state before a segment, then adds the segment's sum to the carried state.
    KGEN_DEVICE void reduce_carry(int i, int unit, int cta, const Vec<float, 4> (&sum)[2]) const {
        constexpr int kEightRows = 8 * 16;  // elements
        Vec<float, 4>& left = carried(i, 0);
        Vec<float, 4>& right = carried(i, 1);
        T* there = state_of(cta) + offset(unit / kValueUnits * 16 + mma_lane().g,
                                            unit % kValueUnits * 16 + column_of_quad());
#pragma unroll
        for (int half = 0; half < 2; ++half)
            *reinterpret_cast<Vec<u32, 2>*>(there + half * kEightRows) =
                quad_of_row<T>(left.data, right.data, half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            left[j] += sum[0][j];
            right[j] += sum[1][j];
        }
    }

    // The carried state, in shared memory: this lane's accumulators of a tile of the warp's unit i.
    static KGEN_DEVICE Vec<float, 4>& carried(int i, int tile) {
        return reinterpret_cast<Vec<float, 4>*>(dynamic_smem<char>() + ScratchOffset)
            [(2 * i + tile) * Threads + thread_rank()];
    }

    GridBarrier<Ctas> barrier_;
    float* sums_;  // of the head, as are the states
    T* states_;
    int rank_;
};

}  // namespace kgen
