// What the chunked kernels of wkv5 and wkv6 share: a block's part of a ChunkWalk with decays.
#pragma once

#include "chunk_place.cuh"
#include "chunk_walk.cuh"
#include "wkv.cuh"

namespace kgen::wkv {

// A sequence's rows of a head.
template <class T>
KGEN_DEVICE StepRows<T> step_rows(const Rows<T>& rows, const Span& span, i64 h) {
    return {rows.head(span, h).first, rows.of_t};
}

// What products are as good as: a state that is handed out is fp32's, else the tensors' type will do.
template <class T, class FinalState>
struct ProductOf {
    using Type = FinalState;
};
template <class T>
struct ProductOf<T, none> {
    using Type = T;
};

// Extents of a kernel: features, steps of a chunk, blocks in a row along the steps.
template <int K, int V, int Chunk, int Segments>
struct ChunkedExtents {
    static constexpr int kK = K, kV = V, kChunk = Chunk, kSegments = Segments;
};

// Sums of k v^T over each segment but the last, and the products of its decays.
template <class Walk, class E, class T, class W>
KGEN_DEVICE void sum_segment(E, i64 H, i64 steps, Rows<const T> k, Rows<const T> v,
                             Rows<const W> w, float* parts, float* decays) {
    constexpr int kSlices = ceil_div(E::kV, Walk::kSlice);
    const WalkPlace place(steps, E::kChunk, E::kSegments, E::kSegments - 1, kSlices);
    const int value = place.rest * Walk::kSlice;
    const Span span{place.head / H, 0, steps};  // packed sequences have no segments
    const i64 h = place.head % H;
    const auto keys = step_rows(k, span, h);
    const i64 part = place.head * (E::kSegments - 1) + place.segment;

    const WalkRows<T> rows{keys, keys, step_rows(v, span, h).from(value), {}, place.first,
                           place.end, min(E::kV - value, Walk::kSlice), 1.0f, 1.0f};
    WalkStates states{};
    states.end = parts + part * E::kK * E::kV + value;
    states.end_key_stride = E::kV;
    states.end_value_stride = 1;
    if (place.rest == 0) states.end_key_sum = decays + part * E::kK;
    Walk(rows, states, {step_rows(w, span, h), nullptr}).sum();
}

// Outputs of a segment, and of the last one the state behind it.
template <class Walk, class E, class T, class W, class U, class Offset>
KGEN_DEVICE void walk_segment(E, i64 H, i64 steps, const Offset* offsets, Rows<const T> r,
                              Rows<const T> k, Rows<const T> v, Rows<const W> w, const U* u,
                              const float* initial_state, const float* parts, const float* decays,
                              Rows<T> y, float* final_state, float scale) {
    static_assert(E::kSegments == 1 || !kPresent<Offset>, "only the GPU knows where to cut");
    constexpr int kSlices = ceil_div(E::kV, Walk::kSlice);
    const i64 sequence = blockIdx.x / kSlices / E::kSegments / H;
    const Span span = span_of(offsets, sequence, steps);
    const WalkPlace place(span.steps, E::kChunk, E::kSegments, E::kSegments, kSlices);
    const int value = place.rest * Walk::kSlice;
    const i64 head = place.head, h = head % H, state = head * E::kK * E::kV + value;

    const WalkRows<T> rows{step_rows(r, span, h), step_rows(k, span, h),
                           step_rows(v, span, h).from(value), step_rows(y, span, h).from(value),
                           place.first, place.end, min(E::kV - value, Walk::kSlice), scale, 1.0f};
    WalkStates states{};
    if (initial_state != nullptr) states.state = initial_state + state;
    states.key_stride = states.end_key_stride = E::kV;
    states.value_stride = states.end_value_stride = 1;
    states.count = place.segment;
    states.parts = parts + head * (E::kSegments - 1) * E::kK * E::kV + value;
    states.key_parts = decays + head * (E::kSegments - 1) * E::kK;
    states.part_stride = E::kK * E::kV;
    states.end_factor = 1.0f;
    if (final_state != nullptr && place.segment == E::kSegments - 1)
        states.end = final_state + state;
    Walk(rows, states, {step_rows(w, span, h), u + h * E::kK}).walk();
}

}  // namespace kgen::wkv
