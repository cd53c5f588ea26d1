// States in memory as fp16, scaled by a power of two per value feature of a state, so that they have 11 bits at any
// magnitude: as many as TF32, as which tensor cores read them, and three more than bf16.
//
// Layout: states [H, chunks, K, V] of fp16, then from the next multiple of 16 bytes on float scales [H, chunks, V].
//
// The scale maps the largest finite value of a column to [2^14, 2^15). Values below 2^-28 times that value lose bits.
// NaN and Inf are kept.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen::wkv7 {

// Whether states of this dtype have scales.
template <class State>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<fp16> = true;
template <>
constexpr bool kScaled<const fp16> = true;

// The address of the scales of `count` states of `size` elements; null if this dtype has none.
template <class State>
KGEN_DEVICE float* scales_of(State* states, i64 count, int size) {
    if constexpr (!kScaled<State>) return nullptr;
    return reinterpret_cast<float*>(const_cast<fp16*>(reinterpret_cast<const fp16*>(states))) +
           ceil_div(count * size, i64{8}) * 4;
}

// |x|, or 0 if it is not finite.
KGEN_DEVICE float finite_magnitude(float x) {
    const u32 bits = bit_cast<u32>(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bit_cast<float>(bits) : 0.0f;
}

struct LargerNumber {
    static KGEN_DEVICE float apply(float a, float b) { return fmax(a, b); }
};

// Factors of a column: to_memory before it is rounded and stored, from_memory after it is read.
struct StateScale {
    float to_memory, from_memory;

    // largest: the column's largest finite magnitude. Below 2^-112 the scale stays the same.
    KGEN_DEVICE explicit StateScale(float largest) {
        const u32 exponent = max(bit_cast<u32>(largest) >> 23, 15u);
        to_memory = bit_cast<float>((268u - exponent) << 23);
        from_memory = bit_cast<float>((exponent - 14u) << 23);
    }
};

}  // namespace kgen::wkv7
