// split_t: a linear recurrence whose steps are split over the CTAs of a head.
//
//     S_t = S_{t-1} + b_t v_t^T,  out_t = factor * a_t S_t
//
// The steps are processed in rounds of kSteps = Ctas * Segment::kSegment steps. In a round CTA r of a head
// has segment r:
//
//     1. It sums b v^T over its segment and writes the sum to global memory.
//     2. It computes the intra-segment part of its outputs, which needs no other CTA.
//     3. The exchange computes the state before its segment from the sums of all CTAs of the head.
//     4. It adds a times that state to its outputs and writes them.
//
// Step 4 also checks the outputs: if any is NaN or infinite, the CTA computes this segment and all later ones
// again, step by step (step_by_step.cuh), because NaN times zero beyond the causal mask would spread.
//
// Files: the work of one CTA in a round is split_t_mma.cuh (mma) or split_t_wgmma.cuh (wgmma). Step 3 is
// split_t_exchange_scan.cuh (all threads; used with mma) or split_t_exchange_gather.cuh (a reducer warpgroup;
// used with wgmma).
//
// Shared memory: Segment::kBytes of rows and states; Exchange::kScratchBytes; the Round (kRoundBytes).
//
// Synchronisation: the grid barrier between the CTAs of a head is kgen::GridBarrier or GridBarrierCounter
// (grid_barrier.cuh), a counter in global memory per head and block of value features. The exchange arrives
// and waits there. Between rounds all threads of the CTA wait at a block barrier.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/step_by_step.cuh"
#include "kgen/chunked/chunk_attention.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/chunked/segment_ends.cuh"

namespace kgen {

// Segment: MmaSegment or WgmmaSegment. Ctas: CTAs of a head. HasInitialState, HasFinalState: whether the
// caller passes an initial state and wants the final state.
template <class Segment, int Ctas, bool HasInitialState, bool HasFinalState>
class SplitTLoop {
    using T = typename Segment::Element;
    static constexpr int kBlockV = Segment::kBlockV;
    static constexpr int kFeatures = Segment::kFeatures, kValues = Segment::kValues;
    static constexpr int kSteps = Ctas * Segment::kSegment;  // of a round
    static constexpr int kRoundBytes = 176;
    // Whether the threads after the consumers are a reducer warpgroup, which alone runs the exchange. WgmmaSegment has
    // one; its kernel must call no function, or ptxas serialises its wgmma.
    static constexpr bool kHasReducer = Segment::kThreads > Segment::kConsumers;

    static_assert(step_by_step_bytes(kFeatures, kBlockV) <= Segment::kFreeBytes,
                  "the step-by-step fallback reuses the shared memory of the segment");

public:
    static constexpr int kThreads = Segment::kThreads;
    static constexpr int kValueBlocks = (kValues + kBlockV - 1) / kBlockV;
    using Exchange = typename Segment::template Exchange<Ctas, HasInitialState, HasFinalState>;
    using SegmentEnds = kgen::SegmentEnds<kFeatures, kValues>;
    static constexpr int kSmemBytes = Segment::kBytes + Exchange::kScratchBytes + kRoundBytes;

    // rows: all steps of the head; v, out and the states begin with the CTA's first value feature.
    KGEN_DEVICE SplitTLoop(const RecurrenceRows<T>& rows, const SegmentEnds& ends,
                           const Exchange& exchange)
        : round_(store_round({rows, ends, exchange})) {}

    KGEN_DEVICE void run() {
        Exchange& exchange = round_.exchange;
        if constexpr (!kHasReducer) {
            exchange.load_initial_state(round_.ends);
            run_rounds<true>();
            if constexpr (HasFinalState) exchange.store_final_state(round_.ends);
        } else if (thread_rank() < Segment::kConsumers) {
            if constexpr (Segment::kSharesRegisters) setmaxnreg_inc<Segment::kConsumerRegisters>();
            run_rounds<true>();
        } else {
            if constexpr (Segment::kSharesRegisters) setmaxnreg_dec<Segment::kReducerRegisters>();
            exchange.load_initial_state(round_.ends);
            run_rounds<false>();
        }
    }

private:
    // One round, as the CTA sees it. It lies in shared memory: registers have no room for addresses that the
    // compiler would keep from round to round.
    struct Round {
        RecurrenceRows<T> rows;  // `first` is the first step of the round
        SegmentEnds ends;
        Exchange exchange;

        // The first step of the CTA's segment.
        KGEN_DEVICE i64 first() const { return rows.first + exchange.rank() * Segment::kSegment; }
        // How many steps of the segment exist. The others are zeros, and so are their sums: a CTA without
        // steps does what all CTAs do.
        KGEN_DEVICE int left() const {
            return static_cast<int>(min(max(rows.end - first(), i64{0}), i64{Segment::kSegment}));
        }
        KGEN_DEVICE int number() const { return static_cast<int>(rows.first / kSteps); }
        KGEN_DEVICE bool is_last() const { return rows.first + kSteps >= rows.end; }
        // Whether there is a state before the segment. Otherwise it is zero.
        KGEN_DEVICE bool has_state() const { return HasInitialState || first() > 0; }
    };

    // The state before the segment, as the exchange stored it, for the step-by-step fallback.
    struct StateBefore : RecurrenceStates {
        const T* state;  // or null: zeros

        template <bool>
        KGEN_DEVICE float initial_at(int key, int value, int, int) const {
            return state != nullptr ? to_float(state[Exchange::offset(key, value)]) : 0.0f;
        }
    };

    static KGEN_DEVICE Round& store_round(const Round& given) {
        static_assert(sizeof(Round) <= kRoundBytes && alignof(Round) <= 16, "see kSmemBytes");
        Round& stored = *reinterpret_cast<Round*>(dynamic_smem<char>() + kSmemBytes - kRoundBytes);
        if (thread_rank() == 0) {
            stored = given;
            if constexpr (kHasReducer) stored.exchange.init_mbarrier();
        }
        sync_block();
        return stored;
    }

    // Computes: whether the thread is a consumer; false for the reducer warpgroup.
    template <bool Computes>
    KGEN_DEVICE void run_rounds() {
        while (run_round<Computes>())
            if (!go_to_next_round()) return;
        // A state that is not finite stays not finite. The fallback is a function call where that is possible, so
        // that its registers do not add to those of the loop; ptxas serialises the wgmma of a kernel that
        // calls any function.
        if constexpr (kHasReducer) {
            run_rounds_step_by_step<Computes>();
        } else {
            call_step_by_step(*this);
        }
    }

    static KGEN_DEVICE_NOINLINE void call_step_by_step(SplitTLoop loop) {
        loop.template run_rounds_step_by_step<true>();
    }

    // Computes the current round, whose exchange is done, and all later rounds step by step.
    template <bool Computes>
    KGEN_DEVICE void run_rounds_step_by_step() {
        run_segment_step_by_step();
        while (go_to_next_round()) {
            if constexpr (Computes) {
                segment_.run_round_without_outputs(round_);
            } else {
                segment_.reduce(round_);
            }
            run_segment_step_by_step();
        }
    }

    // Returns whether there is a next round. The block barriers also free the shared memory of the segment.
    KGEN_DEVICE bool go_to_next_round() {
        sync_block();
        if (opaque(thread_rank()) == 0) round_.rows.first += kSteps;
        sync_block();
        return round_.rows.first < round_.rows.end;
    }

    // Returns whether all outputs of the CTA are finite.
    template <bool Computes>
    KGEN_DEVICE bool run_round() {
        float nonfinite = 0.0f;
        if constexpr (Computes) {
            nonfinite = segment_.run_round(round_);
        } else {
            segment_.reduce(round_);
        }
        return !block_any_nonfinite<kThreads / kWarpSize>(nonfinite);
    }

    // Computes the CTA's segment of the round from the state before it.
    KGEN_DEVICE void run_segment_step_by_step() const {
        RecurrenceRows<T> segment = round_.rows;
        segment.first = round_.first();
        segment.end = segment.first + round_.left();
        StateBefore state{};
        state.state = round_.has_state() ? segment_.state_before(round_.exchange) : nullptr;
        run_step_by_step<T, kFeatures, kValues, kBlockV, kThreads, false, false, false, true>(
            segment, state, NoDecayRows{});
    }

    Round& round_;
    Segment segment_;
};

}  // namespace kgen
