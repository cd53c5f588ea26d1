// What the chunked kernels of wkv5 and wkv6 share: a block's part of a ChunkWalk with decays.
#pragma once

#include "chunk_place.cuh"
#include "chunk_walk.cuh"
#include "wkv.cuh"

namespace kgen::wkv {

// The rows of head `head`, counted over batch and heads.
template <class T>
KGEN_DEVICE StepRows<T> steps_of(const Rows<T>& rows, i64 head, i64 H) {
    const Rows<T> its = rows.head(head / H, head % H);
    return {its.first, its.of_t};
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
    const auto keys = steps_of(k, place.head, H);
    const i64 part = place.head * (E::kSegments - 1) + place.segment;

    const WalkRows<T> rows{keys, keys, steps_of(v, place.head, H).from(value), {}, place.first,
                           place.end, min(E::kV - value, Walk::kSlice), 1.0f, 1.0f};
    WalkStates states{};
    states.end = parts + part * E::kK * E::kV + value;
    states.end_key_stride = E::kV;
    states.end_value_stride = 1;
    if (place.rest == 0) states.end_key_sum = decays + part * E::kK;
    Walk(rows, states, {steps_of(w, place.head, H), nullptr}).sum();
}

// Outputs of a segment, and of the last one the state behind it.
template <class Walk, class E, class T, class W, class U>
KGEN_DEVICE void walk_segment(E, i64 H, i64 steps, Rows<const T> r, Rows<const T> k,
                              Rows<const T> v, Rows<const W> w, const U* u,
                              const float* initial_state, const float* parts, const float* decays,
                              Rows<T> y, float* final_state, float scale) {
    constexpr int kSlices = ceil_div(E::kV, Walk::kSlice);
    const WalkPlace place(steps, E::kChunk, E::kSegments, E::kSegments, kSlices);
    const int value = place.rest * Walk::kSlice;
    const i64 head = place.head, state = head * E::kK * E::kV + value;

    const WalkRows<T> rows{steps_of(r, head, H), steps_of(k, head, H),
                           steps_of(v, head, H).from(value), steps_of(y, head, H).from(value),
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
    Walk(rows, states, {steps_of(w, head, H), u + head % H * E::kK}).walk();
}

}  // namespace kgen::wkv
