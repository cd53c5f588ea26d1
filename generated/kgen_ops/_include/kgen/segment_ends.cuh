// The states that a walk in segments begins with and leaves.
#pragma once

#include "core.cuh"

namespace kgen {

// [Keys][Values] of fp32, from the slice's first value feature on. What the walk does not begin with, or
// nobody asks for, is null, and then nobody calls for it.
template <int Keys, int Values>
struct SegmentEnds {
    const float* initial;
    float* end;
    int values;  // features of the slice that exist

    // Blocks have whole fragments: features that do not exist are zeros and go nowhere.
    KGEN_DEVICE bool has(int key, int value) const { return key < Keys && value < values; }
    KGEN_DEVICE float first(int key, int value) const {
        return has(key, value) ? initial[key * Values + value] : 0.0f;
    }
    KGEN_DEVICE void store_last(int key, int value, float x) const {
        if (has(key, value)) end[key * Values + value] = x;
    }
};

}  // namespace kgen
