// Pairs of a block's threads in shared memory, to scan them over the segments of time.
//
// Shared memory: float [slots][3][Width][Lanes]; neighbouring lanes use neighbouring banks.
// Synchronisation: the caller's barriers.
#pragma once

#include "kgen/wkv4/pair.cuh"

namespace kgen::wkv4 {

template <int Lanes, int Width>
struct PairSlots {
    static constexpr int kFloats = 3 * Width * Lanes;  // of a slot

    float* memory;

    KGEN_DEVICE void put(int slot, int lane, const Pair (&pairs)[Width]) const {
        float* at = memory + slot * kFloats + lane;
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            at[j * Lanes] = pairs[j].exponent;
            at[(Width + j) * Lanes] = pairs[j].a;
            at[(2 * Width + j) * Lanes] = pairs[j].b;
        }
    }
    KGEN_DEVICE Pair get(int slot, int lane, int j) const {
        const float* at = memory + slot * kFloats + lane;
        return Pair{at[j * Lanes], at[(Width + j) * Lanes], at[(2 * Width + j) * Lanes]};
    }
};

}  // namespace kgen::wkv4
