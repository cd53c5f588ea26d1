// Outputs of a linear recurrence by a group of blocks, which have a segment of the steps each.
//
//     S_t = S_{t-1} + b_t v_t^T,  out_t = factor * a_t S_t
//
// No block walks: it sums its segment's b v^T, and the group exchanges the sums while each block makes
// what its steps read of the same segment. Then each block has the state before its segment, and rows of
// outputs are finished as they lie in registers. What is not here:
//
//     what a block has of a segment, how it multiplies, what it does while it waits for others:
//     warp_segment.cuh, group_segment.cuh
//
//     how sums become states before segments:
//     scanned_exchange.cuh, by all threads of the first; gathered_exchange.cuh, by warps of the second that
//     do nothing else
//
// A sequence that is longer than the group's segments takes several rounds. What is not finite is noticed
// by its effect on outputs, and then a block does its segment again step by step.
#pragma once

#include "block.cuh"
#include "chunk_place.cuh"
#include "chunk_plain.cuh"
#include "chunk_rows.cuh"
#include "math.cuh"
#include "registers.cuh"
#include "segment_ends.cuh"

namespace kgen {

// Segment: WarpSegment or GroupSegment; Blocks: of a group; Begins, Ends: whether there are states to begin
// with and to hand out.
template <class Segment, int Blocks, bool Begins, bool Ends>
class SegmentWalk {
    using T = typename Segment::Element;
    static constexpr int kSlice = Segment::kSlice;
    static constexpr int kFeatures = Segment::kFeatures, kValues = Segment::kValues;
    static constexpr int kSteps = Blocks * Segment::kSegment;  // of a round
    static constexpr int kKept = 176;                          // bytes, see below
    // Whether the warps behind those that work exchange, and nobody else. They go with wgmma, and so does
    // that the kernel calls no function.
    static constexpr bool kServed = Segment::kThreads > Segment::kWorkers;

    static_assert(plain_walk_bytes(kFeatures, kSlice) <= Segment::kFreeBytes,
                  "a walk step by step takes the place of the segment");

public:
    static constexpr int kThreads = Segment::kThreads;
    static constexpr int kSlices = (kValues + kSlice - 1) / kSlice;
    using Exchange = typename Segment::template Exchange<Blocks, Begins, Ends>;
    using SegmentEnds = kgen::SegmentEnds<kFeatures, kValues>;
    static constexpr int kSmemBytes = Segment::kBytes + Exchange::kRoomBytes + kKept;

    // Rows of all steps; of v, out and the states from the slice's first feature on.
    KGEN_DEVICE SegmentWalk(const WalkRows<T>& rows, const SegmentEnds& ends,
                            const Exchange& exchange)
        : round_(kept({rows, ends, exchange})) {}

    KGEN_DEVICE void walk() {
        Exchange& exchange = round_.exchange;
        if constexpr (!kServed) {
            exchange.begin(round_.ends);
            walk_rounds<true>();
            if constexpr (Ends) exchange.hand_out_end(round_.ends);
        } else if (thread_rank() < Segment::kWorkers) {
            if constexpr (Segment::kSharesRegisters) take_registers<Segment::kWorkerRegisters>();
            walk_rounds<true>();
        } else {
            if constexpr (Segment::kSharesRegisters) leave_registers<Segment::kServerRegisters>();
            exchange.begin(round_.ends);
            walk_rounds<false>();
        }
    }

private:
    // The next Blocks segments, as the block sees them. Lies in shared memory: registers have room for what
    // one tensor needs at a time, and for no addresses that a compiler would carry from round to round.
    struct Round {
        WalkRows<T> rows;  // first: of the round
        SegmentEnds ends;
        Exchange exchange;

        // The block's first step, and how many of its segment exist. Steps behind the last one are zeros, as
        // are their sums: a block that has no others does what all do.
        KGEN_DEVICE i64 first() const { return rows.first + exchange.rank() * Segment::kSegment; }
        KGEN_DEVICE int left() const {
            return static_cast<int>(min(max(rows.end - first(), i64{0}), i64{Segment::kSegment}));
        }
        KGEN_DEVICE int number() const { return static_cast<int>(rows.first / kSteps); }
        KGEN_DEVICE bool is_last() const { return rows.first + kSteps >= rows.end; }
        // Whether there is a state before the segment. Else it is zero.
        KGEN_DEVICE bool has_state() const { return Begins || first() > 0; }
    };

    // The state before the segment, as the exchange has left it.
    struct StateBefore : WalkStates {
        const T* state;  // or null: zeros

        template <bool>
        KGEN_DEVICE float first(int key, int value, int, int) const {
            return state != nullptr ? to_float(state[Exchange::offset(key, value)]) : 0.0f;
        }
    };

    // Shared memory: the segment; the exchange's room; Round.
    static KGEN_DEVICE Round& kept(const Round& given) {
        static_assert(sizeof(Round) <= kKept && alignof(Round) <= 16, "see kSmemBytes");
        Round& of_block = *reinterpret_cast<Round*>(dynamic_smem<char>() + kSmemBytes - kKept);
        if (thread_rank() == 0) {
            of_block = given;
            if constexpr (kServed) of_block.exchange.make_barrier();
        }
        sync_block();
        return of_block;
    }

    // Works: not of those warps that serve the others.
    template <bool Works>
    KGEN_DEVICE void walk_rounds() {
        while (take_round<Works>())
            if (!go_to_next_round()) return;
        // What is not finite stays so. In a function that is called, registers of the loop hold nothing of
        // it; but a kernel that calls any has its wgmma done one by one.
        if constexpr (kServed) {
            walk_segments<Works>();
        } else {
            go_on_step_by_step(*this);
        }
    }

    static KGEN_CALLED_DEVICE void go_on_step_by_step(SegmentWalk walk) {
        walk.template walk_segments<true>();
    }

    // The round that has been taken, and those behind it, step by step.
    template <bool Works>
    KGEN_DEVICE void walk_segments() {
        walk_segment();
        while (go_to_next_round()) {
            if constexpr (Works) {
                segment_.take_sums(round_);
            } else {
                segment_.serve(round_);
            }
            walk_segment();
        }
    }

    // Whether there is one.
    KGEN_DEVICE bool go_to_next_round() {
        sync_block();  // shared memory is free, too
        if (computed_here(thread_rank()) == 0) round_.rows.first += kSteps;
        sync_block();
        return round_.rows.first < round_.rows.end;
    }

    // Returns whether the block's outputs are finite.
    template <bool Works>
    KGEN_DEVICE bool take_round() {
        float poison = 0.0f;
        if constexpr (Works) {
            poison = segment_.take_round(round_);
        } else {
            segment_.serve(round_);
        }
        return !block_has<kThreads / kWarpSize>(poison);
    }

    // The block's segment of the round, step by step, from the state before it.
    KGEN_DEVICE void walk_segment() const {
        WalkRows<T> segment = round_.rows;
        segment.first = round_.first();
        segment.end = segment.first + round_.left();
        StateBefore state{};
        state.state = round_.has_state() ? segment_.state_before(round_.exchange) : nullptr;
        walk_plainly<T, kFeatures, kValues, kSlice, kThreads, false, false, false, true>(
            segment, state, NoDecayRows{});
    }

    Round& round_;
    Segment segment_;
};

}  // namespace kgen
