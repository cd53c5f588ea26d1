// The kernels of wkv5 and wkv6 backward by segments of T that run at the same time; bf16, also w.
//
//     sum_segments  what a segment adds to the state or to its gradient, and the segment's product of decays
//                   (segment_states.cuh)
//     write_states  loops over the steps of a segment with the state, and writes it before every 16 steps
//     gradients     loops backward over the chunks of a segment, all gradients (gradient_loop.cuh)
//
// A Shape has
//     Config, SumConfig  of GradientLoop and of SegmentStates
//     States             of StateLoop
//     Offset             element of cu_seqlens; none: a batch row is a sequence
//     Cut                of sequences into segments: wkv::EqualSegments or wkv::PackedSegments
//     kFinalState        whether there may be a gradient of the final state
#pragma once

#include "kgen/wkv/chunk_memory.cuh"
#include "kgen/wkv/packed_segments.cuh"
#include "kgen/wkv/segment_block.cuh"
#include "kgen/wkv/state_loop.cuh"
#include "kgen/wkv6/gradient_loop.cuh"
#include "kgen/wkv6/segment_start.cuh"
#include "kgen/wkv6/segment_states.cuh"

namespace kgen::wkv6 {

template <class Shape>
struct SegmentedGradients {
    using Config = typename Shape::Config;
    using SumConfig = typename Shape::SumConfig;
    using Offset = typename Shape::Offset;
    using Cut = typename Shape::Cut;
    using W = typename Config::W;
    using U = typename Config::U;
    using Sums = SegmentStates<SumConfig>;
    using Loop = GradientLoop<Config>;
    using Span = wkv::Span;
    template <class T>
    using Rows = wkv::Rows<T>;
    static constexpr int kValueBlocks = ceil_div(Config::kV, SumConfig::kColumns);  // of sum_segments
    static constexpr i64 kStateSize = i64{Config::kK} * Config::kV;

    // A block's segment of a sequence, and its first chunk of 16 steps in a workspace [H, chunk slots], or
    // [N, H, chunks].
    struct Segment : Cut::template Block<1> {
        i64 h;
        Span sequence, span;
        i64 chunk;

        KGEN_DEVICE Segment(const Cut& cut, const Offset* cu_seqlens, i64 N, i64 T, i64 H)
            : Cut::template Block<1>(cut.template block<1>(static_cast<int>(blockIdx.x))),
              h(this->head % H),
              sequence(wkv::span_of(cu_seqlens, this->head / H, T)),
              span(this->own(sequence)) {
            const i64 n = this->head / H;
            chunk = kPresent<Offset> ? h * (T / 16 + N) + wkv::first_chunk_slot<16>(sequence.first, n)
                                     : this->head * ceil_div(T, i64{16});
            chunk += (span.first - sequence.first) / 16;
        }
    };

    // One block computes what a segment adds to the state (from k and v), or to its gradient (from r and gy), for up to
    // 64 value features of a head.
    template <bool Gradient>
    static KGEN_DEVICE void sum_segments(const Cut& cut, i64 N, i64 T, i64 H, const Offset* cu_seqlens,
                                         const Rows<const bf16>& keys, const Rows<const bf16>& values,
                                         const Rows<const W>& w, float* sums, float* decays, float scale) {
        using Sums = SegmentStates<SumConfig, Gradient>;
        auto block = cut.template sum_block<kValueBlocks>(static_cast<int>(blockIdx.x / 2));
        const i64 h = block.head % H;
        i64 place = cut.first_place(block) + block.segment + (Gradient ? cut.places(N * H) : 0);
        if constexpr (Cut::kLeavesOut) {
            const Span sequence = wkv::span_of(cu_seqlens, block.head / H, T);
            const bool is_read =
                Gradient ? block.segment > 0 && block.own(sequence).steps > 0 : block.later(sequence).steps > 0;
            if (!is_read) return;
            if (Gradient) --place;  // the gradient before a segment has the place of the segment before it
        } else if (Gradient) {
            ++block.segment;  // all segments but the first
        }
        const int value = block.columns * SumConfig::kColumns;
        const Span span = block.own(wkv::span_of(cu_seqlens, block.head / H, T));
        auto value_steps = step_pointer(values, span, h);
        value_steps.first += value;
        const Sums sum{step_pointer(keys, span, h), value_steps, step_pointer(w, span, h), span.steps,
                       min(Config::kV - value, SumConfig::kColumns), sums + place * kStateSize + value,
                       block.columns == 0 ? decays + place * Config::kK : nullptr, scale};
        sum();
    }

    static KGEN_DEVICE void write_states(const Cut& cut, i64 N, i64 T, i64 H, const Offset* cu_seqlens,
                                         const Rows<const bf16>& k, const Rows<const bf16>& v, const Rows<const W>& w,
                                         const float* sums, const float* decays, u32* states) {
        const Segment segment(cut, cu_seqlens, N, T, H);
        const Span &span = segment.span, earlier = segment.earlier(segment.sequence);
        if constexpr (Cut::kLeavesOut)
            if (span.steps == 0) return;
        const i64 h = segment.h, place = cut.first_place(segment);
        const SegmentStart<Config, false> start{
            sums + place * kStateSize, decays + place * Config::kK, segment.segment, nullptr,
            step_pointer(k, earlier, h), step_pointer(v, earlier, h), step_pointer(w, earlier, h),
            earlier.steps, 1.0f};
        using StateLoop = wkv::StateLoop<typename Shape::States, true>;
        const int warp = thread_rank() / kWarpSize;
        StateLoop{step_rows(k, span, h), step_rows(v, span, h), step_rows(w, span, h), span.steps, Config::kV, 1.0f}
            .template run_from<false>(start,
                                      states + segment.chunk * Loop::kStateWords +
                                          warp * (Loop::kStateWords / Loop::kWarps),
                                      Loop::kStateWords, Shape::States::kTiles, nullptr);
    }

    // The gradient after a segment. Its sums follow each other from the place of the segment on.
    static KGEN_DEVICE SegmentStart<Config, true> gradient_after(
        const Cut& cut, const Segment& segment, i64 N, i64 H, const Rows<const bf16>& gy, const Rows<const bf16>& r,
        const Rows<const W>& w, const float* gfinal_state, const float* sums, const float* decays, float scale) {
        const i64 end = segment.span.first + segment.span.steps, h = segment.h;
        const Span later{segment.sequence.b, end, segment.sequence.first + segment.sequence.steps - end};
        const i64 place = cut.gradient_place(segment, N * H);
        return {sums + place * kStateSize, decays + place * Config::kK, cut.later_segments(segment, segment.sequence),
                Shape::kFinalState && gfinal_state != nullptr ? gfinal_state + segment.head * kStateSize : nullptr,
                step_pointer(r, later, h), step_pointer(gy, later, h), step_pointer(w, later, h), later.steps, scale};
    }
};

}  // namespace kgen::wkv6
