// States before the segments of a walk, from the sums of what each segment adds.
//
// A walk whose state does not decay adds up outer products. Each segment's sum is made by a block of
// its own, and so are the outputs; between them lies this scan over the segments. It is elementwise:
// the layout of a state is that of whoever wrote the sums.
#pragma once

#include "chunk_place.cuh"
#include "memory.cuh"

namespace kgen {

// Sums of a segment that a thread holds at once: their loads wait together.
template <int Parts, int Width>
constexpr int kScanBatch = min(Parts, Width == 1 ? 32 : 64 / Width);

// Parts[i], `stride` values after parts[i - 1], is the sum of segment i and becomes the state before
// segment i + 1: `state` and all sums up to it, added in order. A thread does Width values.
template <int Parts, int Width>
KGEN_DEVICE void scan_segments(float* parts, i64 stride, Vec<float, Width> state) {
    constexpr int kBatch = kScanBatch<Parts, Width>;
    using Values = Vec<float, Width>;
#pragma unroll 1
    for (int done = 0; done < Parts; done += kBatch) {
        Values sums[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (Parts % kBatch == 0 || done + i < Parts)
                sums[i] = load(reinterpret_cast<const Values*>(parts + i * stride));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (Parts % kBatch != 0 && done + i >= Parts) break;
#pragma unroll
            for (int j = 0; j < Width; ++j) state[j] += sums[i][j];
            store(reinterpret_cast<Values*>(parts + i * stride), state);
        }
        parts += kBatch * stride;
    }
}

// All segments' sums of `states` states of Size values: parts [states, Parts, Size], and before the
// first segment initial [states, Size], or null for zeros. For the threads of a grid; `index` is a
// thread's among them, and what is not one of states * Size / Width does nothing.
template <int Parts, int Width, int Size>
KGEN_DEVICE void scan_states(float* parts, const float* initial, i64 states, i64 index) {
    static_assert(Size % Width == 0, "a thread's values are of one state");
    constexpr int kThreadsPerState = Size / Width;
    if (index < 0 || index >= states * kThreadsPerState) return;
    const i64 which = index / kThreadsPerState;
    const i64 offset = index % kThreadsPerState * Width;
    Vec<float, Width> state;
#pragma unroll
    for (int j = 0; j < Width; ++j)  // one by one: a caller's tensor may begin anywhere
        state[j] = initial != nullptr ? initial[which * Size + offset + j] : 0.0f;
    scan_segments<Parts, Width>(parts + which * Parts * Size + offset, Size, state);
}

// The state before a segment: what scan_states left, before the first one `initial`, or null.
template <int Parts, int Size>
KGEN_DEVICE const float* state_before(const float* parts, const float* initial, i64 which,
                                      int segment) {
    if (segment > 0) return parts + (which * Parts + segment - 1) * Size;
    return initial != nullptr ? initial + which * Size : nullptr;
}

}  // namespace kgen
