// wkv5 and wkv6 forward by a chunk loop: what a block computes, for any loop with the members of kgen::ChunkLoop.
//
//     sum_segment  the state that a segment adds, and its product of decays
//     forward      y of a segment; its initial state comes from the segments before it
#pragma once

#include "kgen/chunked/sequence.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// kK, kV: features of keys and values; kChunk: steps of a chunk; kSegments: parts of T, one block each.
template <class Loop, class Value, class W, class U, class Offset, int kK, int kV, int kChunk,
          int kSegments>
struct ChunkedForward {
    static constexpr int kBlockV = Loop::kBlockV;  // value features of a block
    static constexpr int kValueBlocks = ceil_div(kV, kBlockV);

    static_assert(kSegments == 1 || !kPresent<Offset>, "packed sequences have no segments");

    // One block computes the state that a segment adds, for kBlockV value features of a head.
    static KGEN_DEVICE void sum_segment(i64 H, i64 T, Rows<const Value> k, Rows<const Value> v,
                                        Rows<const W> w, float* segment_states, float* segment_decays) {
        // 1. The block's head, segment and value features.
        const BlockSegment place(T, kChunk, kSegments, kSegments - 1, kValueBlocks);
        const int value = place.rest * kBlockV;
        const Span span{place.head / H, 0, T};
        const i64 h = place.head % H;
        const auto k_steps = step_rows(k, span, h);
        const i64 part = place.head * (kSegments - 1) + place.segment;

        // 2. Chunk by chunk: S = diag(d) S + k^T v from S = 0; one block per segment writes the decays.
        const RecurrenceRows<Value> rows{
            k_steps, k_steps, step_rows(v, span, h).from(value), {}, place.first, place.end,
            min(kV - value, kBlockV), 1.0f, 1.0f};
        RecurrenceStates states{};
        states.final_state = segment_states + part * kK * kV + value;
        states.final_key_stride = kV;
        states.final_value_stride = 1;
        if (place.rest == 0) states.final_key_sum = segment_decays + part * kK;
        Loop(rows, states, {step_rows(w, span, h), nullptr}).sum_segment();
    }

    // One block computes y of a segment, for kBlockV value features of a head.
    static KGEN_DEVICE void forward(i64 H, i64 T, const Offset* cu_seqlens, Rows<const Value> r,
                                    Rows<const Value> k, Rows<const Value> v, Rows<const W> w, const U* u,
                                    const float* initial_state, const float* segment_states,
                                    const float* segment_decays, Rows<Value> y, float* final_state,
                                    float scale) {
        // 1. The block's sequence, head, segment and value features.
        const i64 sequence = blockIdx.x / kValueBlocks / kSegments / H;
        const Span span = span_of(cu_seqlens, sequence, T);
        const BlockSegment place(span.steps, kChunk, kSegments, kSegments, kValueBlocks);
        const int value = place.rest * kBlockV;
        const i64 head = place.head, h = head % H, state = head * kK * kV + value;

        const RecurrenceRows<Value> rows{
            step_rows(r, span, h), step_rows(k, span, h),
            step_rows(v, span, h).from(value), step_rows(y, span, h).from(value),
            place.first, place.end, min(kV - value, kBlockV), scale, 1.0f};

        // 2. The segment's initial state: the decayed initial state of the sequence, and what earlier segments add.
        RecurrenceStates states{};
        if (initial_state != nullptr) states.initial_state = initial_state + state;
        states.initial_key_stride = states.final_key_stride = kV;
        states.initial_value_stride = states.final_value_stride = 1;
        states.segments = place.segment;
        states.segment_sums = segment_states + head * (kSegments - 1) * kK * kV + value;
        states.segment_key_sums = segment_decays + head * (kSegments - 1) * kK;
        states.segment_stride = kK * kV;
        states.final_factor = 1.0f;
        if (final_state != nullptr && place.segment == kSegments - 1)
            states.final_state = final_state + state;

        // 3. Chunk by chunk: y from the state (inter-chunk) and from the scores r k^T (intra-chunk), then
        // the state after the chunk. The last segment writes the final state.
        Loop(rows, states, {step_rows(w, span, h), u + h * kK}).run();
    }
};

}  // namespace kgen::wkv
