// Warp shuffles, votes and reductions.
//
// `mask` is the set of participating lanes; all of them must execute the same call (the host layer reports a lane that
// does not). `width` divides the warp into segments of 1, 2, 4, ..., 32 lanes. A lane that would read beyond its
// segment gets its own value; only shfl_xor may read from an earlier segment. Reading from a lane outside `mask` is
// undefined on a GPU and gives NaN on the host.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// The mask of all lanes.
constexpr u32 kFullMask = 0xffffffffu;

namespace detail {

#if KGEN_HOST

// The source lane as PTX defines it for shfl.sync with clamp (32 - width) << 8 | bound.
struct Segment {
    int lane, first, last;
};

KGEN_DEVICE Segment segment_of_lane(int width) {
    if (!is_power_of_two(width) || width > kWarpSize)
        host::fault("shuffle width %d: allowed are 1, 2, 4, 8, 16, 32", width);
    const int lane = lane_id();
    const int first = lane & ~(width - 1);
    return Segment{lane, first, first + width - 1};
}

template <class T>
KGEN_DEVICE T exchange(host::Exchange operation, u32 mask, int source, T value) {
    static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
    u64 bits = 0;
    copy_bytes<sizeof(T)>(&bits, &value);
    bits = host::exchange(operation, mask, static_cast<u32>(source), bits);
    T result;
    copy_bytes<sizeof(T)>(&result, &bits);
    return result;
}

#else

// The intrinsics move 32 bits: 8-byte values take two calls, values of fewer than 4 bytes are padded with zeros.
template <class T, class Move>
KGEN_DEVICE T by_words(T value, Move move) {
    static_assert(sizeof(T) <= 8 && sizeof(T) != 3, "shuffles move at most 8 bytes");
    constexpr int kWords = sizeof(T) <= 4 ? 1 : 2;
    u32 words[kWords] = {};
    copy_bytes<sizeof(T)>(words, &value);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = move(words[i]);
    T result;
    copy_bytes<sizeof(T)>(&result, words);
    return result;
}

#endif

}  // namespace detail

// Returns the value of lane `source` (modulo `width`) of the caller's segment.
template <class T>
KGEN_DEVICE T shfl(T value, int source, u32 mask = kFullMask, int width = kWarpSize) {
#if KGEN_HOST
    const detail::Segment s = detail::segment_of_lane(width);
    return detail::exchange(host::Exchange::shfl, mask, s.first + (source & (width - 1)), value);
#else
    return detail::by_words(value, [=](u32 w) { return __shfl_sync(mask, w, source, width); });
#endif
}

// Returns the value of the lane `delta` below. The lowest `delta` lanes of a segment keep their own.
template <class T>
KGEN_DEVICE T shfl_up(T value, int delta, u32 mask = kFullMask, int width = kWarpSize) {
#if KGEN_HOST
    const detail::Segment s = detail::segment_of_lane(width);
    const int source = s.lane - (delta & (kWarpSize - 1));
    return detail::exchange(host::Exchange::shfl_up, mask, source >= s.first ? source : s.lane,
                            value);
#else
    return detail::by_words(value, [=](u32 w) { return __shfl_up_sync(mask, w, delta, width); });
#endif
}

// Returns the value of the lane `delta` above. The highest `delta` lanes of a segment keep their own.
template <class T>
KGEN_DEVICE T shfl_down(T value, int delta, u32 mask = kFullMask, int width = kWarpSize) {
#if KGEN_HOST
    const detail::Segment s = detail::segment_of_lane(width);
    const int source = s.lane + (delta & (kWarpSize - 1));
    return detail::exchange(host::Exchange::shfl_down, mask, source <= s.last ? source : s.lane,
                            value);
#else
    return detail::by_words(value, [=](u32 w) { return __shfl_down_sync(mask, w, delta, width); });
#endif
}

// Returns the value of lane (own lane ^ bits).
template <class T>
KGEN_DEVICE T shfl_xor(T value, int bits, u32 mask = kFullMask, int width = kWarpSize) {
#if KGEN_HOST
    const detail::Segment s = detail::segment_of_lane(width);
    const int source = s.lane ^ (bits & (kWarpSize - 1));
    return detail::exchange(host::Exchange::shfl_xor, mask, source <= s.last ? source : s.lane,
                            value);
#else
    return detail::by_words(value, [=](u32 w) { return __shfl_xor_sync(mask, w, bits, width); });
#endif
}

// Synchronises the lanes of `mask`: they wait for each other and see each other's writes to memory.
KGEN_DEVICE void sync_warp(u32 mask = kFullMask) {
#if KGEN_HOST
    host::exchange(host::Exchange::sync_warp, mask, static_cast<u32>(lane_id()), 0);
#else
    __syncwarp(mask);
#endif
}

// Returns the set of lanes of `mask` whose `predicate` is true.
KGEN_DEVICE u32 ballot(bool predicate, u32 mask = kFullMask) {
#if KGEN_HOST
    return static_cast<u32>(host::exchange(host::Exchange::ballot, mask,
                                           static_cast<u32>(lane_id()), predicate ? 1 : 0));
#else
    return __ballot_sync(mask, predicate);
#endif
}

// Whether the predicate of any lane of `mask` is true.
KGEN_DEVICE bool any(bool predicate, u32 mask = kFullMask) { return ballot(predicate, mask) != 0; }
// Whether the predicates of all lanes of `mask` are true.
KGEN_DEVICE bool all(bool predicate, u32 mask = kFullMask) { return ballot(!predicate, mask) == 0; }

// Returns the mask of the caller's group of `Lanes` consecutive lanes, for code that only some groups of a warp
// execute. If the whole warp executes the code, kFullMask is cheaper: no mask is computed.
template <int Lanes>
KGEN_DEVICE u32 warp_mask() {
    static_assert(is_power_of_two(Lanes) && Lanes <= kWarpSize, "a group is 1, 2, ..., 32 lanes");
    if constexpr (Lanes == kWarpSize) {
        return kFullMask;
    } else {
        return ((1u << Lanes) - 1u) << (lane_id() & ~(Lanes - 1));
    }
}

// Reduction operator: a + b.
struct Sum {
    static KGEN_DEVICE float apply(float a, float b) { return a + b; }
};
// Reduction operator: the larger value. Unlike fmaxf it keeps a NaN.
struct Max {
    static KGEN_DEVICE float apply(float a, float b) { return a > b || a != a ? a : b; }
};

// Reduces over each group of `Lanes` consecutive lanes by a butterfly. The order of operations is fixed, and all
// lanes of a group get the same bits.
template <int Lanes, class Op>
KGEN_DEVICE float lanes_reduce(float value, u32 mask = kFullMask) {
    static_assert(is_power_of_two(Lanes) && Lanes <= kWarpSize, "a group is 1, 2, ..., 32 lanes");
#pragma unroll
    for (int bits = Lanes / 2; bits > 0; bits /= 2)
        value = Op::apply(value, shfl_xor(value, bits, mask));
    return value;
}

// Returns the sum over each group of `Lanes` consecutive lanes.
template <int Lanes>
KGEN_DEVICE float lanes_sum(float value, u32 mask = kFullMask) {
    return lanes_reduce<Lanes, Sum>(value, mask);
}

// Returns the maximum over each group of `Lanes` consecutive lanes.
template <int Lanes>
KGEN_DEVICE float lanes_max(float value, u32 mask = kFullMask) {
    return lanes_reduce<Lanes, Max>(value, mask);
}

}  // namespace kgen
