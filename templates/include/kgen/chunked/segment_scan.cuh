// The scan of chunk_scan: sums of segments become the states before the segments.
//
// Without decay the state before segment i is the initial state plus the sums of segments 0 to i - 1. The scan is
// elementwise, so a state has the layout of the sums.
//
// Layout: sums [states][Sums][Size] of fp32, replaced in place: sum i becomes the state before segment i + 1.
#pragma once

#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/memory.cuh"

namespace kgen {

// Sums that a thread loads before it adds the first of them.
template <int Sums, int Width>
constexpr int kScanBatch = min(Sums, Width == 1 ? 32 : 64 / Width);

// One thread: scans Width elements over all segments. sums[i * stride] is the sum of segment i and becomes the state
// before segment i + 1: `state` plus all sums up to it, added in order.
template <int Sums, int Width>
KGEN_DEVICE void scan_sums(float* sums, i64 stride, Vec<float, Width> state) {
    constexpr int kBatch = kScanBatch<Sums, Width>;
    using Values = Vec<float, Width>;
#pragma unroll 1
    for (int done = 0; done < Sums; done += kBatch) {
        Values loaded[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (Sums % kBatch == 0 || done + i < Sums)
                loaded[i] = load(reinterpret_cast<const Values*>(sums + i * stride));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (Sums % kBatch != 0 && done + i >= Sums) break;
#pragma unroll
            for (int j = 0; j < Width; ++j) state[j] += loaded[i][j];
            store(reinterpret_cast<Values*>(sums + i * stride), state);
        }
        sums += kBatch * stride;
    }
}

// The threads of a grid: scans sums [states, Sums, Size]. The state before the first segment is initial
// [states, Size], or zeros if null. `index` is the thread's index; threads beyond states * Size / Width do nothing.
template <int Sums, int Width, int Size>
KGEN_DEVICE void states_before_segments(float* sums, const float* initial, i64 states, i64 index) {
    static_assert(Size % Width == 0, "the elements of a thread belong to one state");
    constexpr int kThreadsPerState = Size / Width;
    if (index < 0 || index >= states * kThreadsPerState) return;
    const i64 which = index / kThreadsPerState;
    const i64 offset = index % kThreadsPerState * Width;
    Vec<float, Width> state;
#pragma unroll
    for (int j = 0; j < Width; ++j)  // single loads: the caller's tensor may be unaligned
        state[j] = initial != nullptr ? initial[which * Size + offset + j] : 0.0f;
    scan_sums<Sums, Width>(sums + which * Sums * Size + offset, Size, state);
}

// The state before a segment after states_before_segments(); before the first one `initial`, or null.
template <int Sums, int Size>
KGEN_DEVICE const float* state_before_segment(const float* sums, const float* initial, i64 which,
                                      int segment) {
    if (segment > 0) return sums + (which * Sums + segment - 1) * Size;
    return initial != nullptr ? initial + which * Size : nullptr;
}

}  // namespace kgen
