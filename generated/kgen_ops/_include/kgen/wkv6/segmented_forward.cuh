// The kernels of wkv5 and wkv6 forward by segments of T that run at the same time; bf16.
//
//     sum_segment  what a segment adds to the state, and the segment's product of decays (segment_states.cuh)
//     forward      y of a segment (specialized_loop.cuh). If an output is not finite, the block computes all steps of
//                  the sequence up to the segment's end again, one by one. The block of the last segment with steps
//                  writes the final state, if there is one: from the state before the segment and what it adds
//
// A Shape has
//     Config, StateConfig     of SpecializedLoop and of SegmentStates; Config::kFinalState: whether there is a final
//                             state, and the first kernel sums up all segments of a sequence, else all but the last
//     Offset                  element of cu_seqlens; none: a batch row is a sequence
//     Cut                     of sequences into segments: wkv::EqualSegments or wkv::PackedSegments
//     kPdl                    programmatic dependent launch of the second kernel
//     kInitialState           whether there may be an initial state
#pragma once

#include "kgen/primitives/pdl.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv/packed_segments.cuh"
#include "kgen/wkv/segment_block.cuh"
#include "kgen/wkv6/segment_states.cuh"
#include "kgen/wkv6/specialized_loop.cuh"

namespace kgen::wkv6 {

template <class Shape>
struct SegmentedForward {
    using Config = typename Shape::Config;
    using StateConfig = typename Shape::StateConfig;
    using Offset = typename Shape::Offset;
    using Cut = typename Shape::Cut;
    using W = typename Config::W;
    using U = typename Config::U;
    using States = SegmentStates<StateConfig>;
    using Loop = SpecializedLoop<Config>;
    template <class T>
    using Rows = wkv::Rows<T>;
    static constexpr int kV = Config::kV;
    static constexpr int kStateBlocks = ceil_div(kV, StateConfig::kColumns);
    static constexpr int kValueBlocks = ceil_div(kV, Loop::kColumns);
    static constexpr i64 kStateSize = i64{Config::kK} * kV;
    static_assert(Config::kK % Config::kVec == 0 && kV % Config::kVec == 0, "copies must end with a row");

    // The state before the steps that a block computes one by one: the initial state of the sequence, or the state that
    // earlier steps left in shared memory.
    struct StepStates {
        const float* initial_state;  // from the block's first value feature on, or null
        bool after_earlier_steps;
        float* final_state;  // from the block's first value feature on, or null
        float* norm;         // null
        const float* bias;   // null
        float final_factor, eps;

        template <bool>
        KGEN_DEVICE float initial_at(int key, int value, int, int) const {
            if (after_earlier_steps) return dynamic_smem<float>()[key * Loop::kColumns + value];
            return Shape::kInitialState && initial_state != nullptr ? initial_state[key * kV + value] : 0.0f;
        }
        KGEN_DEVICE void store_final(int key, int value, float x) const {
            if constexpr (Config::kFinalState) final_state[key * kV + value] = x;
        }
    };

    // One block computes what a segment adds to the state, for up to 64 value features of a head.
    static KGEN_DEVICE void sum_segment(const Cut& cut, i64 T, i64 H, const Offset* cu_seqlens, Rows<const bf16> k,
                                        Rows<const bf16> v, Rows<const W> w, float* segment_states,
                                        float* segment_decays) {
        if constexpr (Shape::kPdl) griddepcontrol_launch_dependents();
        const auto block = cut.template sum_block<kStateBlocks>(static_cast<int>(blockIdx.x));
        const i64 h = block.head % H;
        const int value = block.columns * StateConfig::kColumns;
        const wkv::Span sequence = wkv::span_of(cu_seqlens, block.head / H, T);
        if constexpr (Cut::kLeavesOut)
            if (!is_read(cut, block, sequence)) return;
        const wkv::Span span = block.own(sequence);
        auto v_steps = wkv::step_pointer(v, span, h);
        v_steps.first += value;
        const i64 place = cut.first_place(block) + block.segment;
        const States states{wkv::step_pointer(k, span, h), v_steps, wkv::step_pointer(w, span, h), span.steps,
                            min(kV - value, StateConfig::kColumns),
                            segment_states + place * kStateSize + value,
                            block.columns == 0 ? segment_decays + place * Config::kK : nullptr};
        states();
    }

    // Whether the block's segment is the last one with steps; of a sequence without steps, the one that serves it.
    template <class Block>
    static KGEN_DEVICE bool ends(const Cut& cut, const Block& block, const wkv::Span& sequence) {
        // untested: a single segment has no steps only if its sequence has none
        if (block.own(sequence).steps == 0) return sequence.steps == 0 && cut.serves_no_steps(block);
        return block.later(sequence).steps == 0;
    }

    // Whether a block of the second kernel reads what the block's segment adds: later ones, or that of a final state.
    template <class Block>
    static KGEN_DEVICE bool is_read(const Cut& cut, const Block& block, const wkv::Span& sequence) {
        return block.later(sequence).steps > 0 || (Config::kFinalState && ends(cut, block, sequence));
    }

    // One block computes y of a segment, kColumns value features of a head. final_state: null without one.
    static KGEN_DEVICE void forward(const Cut& cut, i64 T, i64 H, const Offset* cu_seqlens, const Rows<const bf16>& r,
                                    const Rows<const bf16>& k, const Rows<const bf16>& v, const Rows<const W>& w,
                                    const U* u, const float* initial_state, const float* segment_states,
                                    const float* segment_decays, const Rows<bf16>& y, float* final_state,
                                    float scale) {
        // 1. The loop over steps of the block's head, and the state before its segment.
        using Block = typename Cut::template Block<kValueBlocks>;
        const auto loop_over = [&](const Block& block, const wkv::Span& span) {
            const i64 h = block.head % H;
            const int value = block.columns * Loop::kColumns;
            RecurrenceStates states{};
            if (Shape::kInitialState) states.initial_state = initial_state + block.head * kStateSize + value;
            states.initial_key_stride = kV;
            states.initial_value_stride = 1;
            states.segment_sums = segment_states + cut.first_place(block) * kStateSize + value;
            states.segment_key_sums = segment_decays + cut.first_place(block) * Config::kK;
            states.segments = block.segment;
            states.segment_stride = kStateSize;
            if (Config::kFinalState && ends(cut, block, wkv::span_of(cu_seqlens, block.head / H, T))) {
                states.final_state = final_state + block.head * kStateSize + value;
                states.final_key_stride = kV;
                states.final_value_stride = 1;
            }
            const RecurrenceRows<bf16> rows{wkv::step_rows(r, span, h), wkv::step_rows(k, span, h),
                                            wkv::step_rows(v, span, h).from(value),
                                            wkv::step_rows(y, span, h).from(value),
                                            0, span.steps, min(kV - value, Loop::kColumns), scale, 1.0f};
            return Loop{rows, states, {wkv::step_rows(w, span, h), u + h * Config::kK}};
        };
        const auto sequence = [&](const Block& block) { return wkv::span_of(cu_seqlens, block.head / H, T); };

        // 2. The segment. If an output is not finite, the block computes the steps before the segment one by one, which
        //    gives the state before the segment, and then the segment's steps. The outputs of the steps before the
        //    segment go to the segment's first row, which is overwritten later.
        const auto wait = [](RecurrenceStates& states) {
            if constexpr (Shape::kPdl) griddepcontrol_wait(states.segment_sums, states.segment_key_sums);
        };
        const Block block = cut.template block<kValueBlocks>(static_cast<int>(blockIdx.x));
        if constexpr (Cut::kLeavesOut) {
            const wkv::Span all = sequence(block);
            if (block.own(all).steps == 0 && !(Config::kFinalState && ends(cut, block, all))) {
                if constexpr (Shape::kPdl) griddepcontrol_wait();
                return;
            }
        }
        loop_over(block, block.own(sequence(block)))(wait, [&] {
            // Computed again, so that it takes no registers during the loop.
            const Block again = cut.template block<kValueBlocks>(opaque(static_cast<int>(blockIdx.x)));
            const Loop own = loop_over(again, again.own(sequence(again)));
            StepStates states{};
            states.initial_state = own.states.initial_state;
            if (again.segment > 0) {
                Loop earlier = loop_over(again, again.earlier(sequence(again)));
                earlier.rows.out = {own.rows.out.rows, 0};
                earlier.run_steps(states);
                states.after_earlier_steps = true;
            }
            if constexpr (Config::kFinalState) {
                states.final_state = own.states.final_state;
                states.final_factor = 1.0f;
            }
            own.run_steps(states);
        });
    }
};

}  // namespace kgen::wkv6
