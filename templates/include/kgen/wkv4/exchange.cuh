// Pairs of a block's threads in shared memory, to scan them over the segments of time.
//
// Shared memory: float [slots][P::kFloats][Width][Lanes]; neighbouring lanes use neighbouring banks.
// Synchronisation: the caller's barriers.
#pragma once

#include "kgen/wkv4/pair.cuh"

namespace kgen::wkv4 {

template <int Lanes, int Width, bool TwoParts>
struct PairSlots {
    using P = PairOf<TwoParts>;
    static constexpr int kFloats = P::kFloats * Width * Lanes;  // of a slot

    float* memory;

    KGEN_DEVICE void put(int slot, int lane, const P (&pairs)[Width]) const {
        float* at = memory + slot * kFloats + lane;
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            at[j * Lanes] = pairs[j].exponent;
            at[(Width + j) * Lanes] = pairs[j].a;
            at[(2 * Width + j) * Lanes] = pairs[j].b;
            if constexpr (TwoParts) at[(3 * Width + j) * Lanes] = pairs[j].low;
        }
    }
    KGEN_DEVICE P get(int slot, int lane, int j) const {
        const float* at = memory + slot * kFloats + lane;
        return P{at[j * Lanes], at[(Width + j) * Lanes], at[(2 * Width + j) * Lanes],
                 TwoParts ? at[(3 * Width + j) * Lanes] : 0.0f};
    }
};

}  // namespace kgen::wkv4
