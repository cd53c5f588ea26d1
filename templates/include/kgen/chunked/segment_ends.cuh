// The initial and the final state of a head, as split_t reads and writes them.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// Pointers to [Keys][Values] of fp32, from the CTA's first value feature on. `initial` and `end` may be null; the
// kernel then calls neither first() nor store_last().
template <int Keys, int Values>
struct SegmentEnds {
    const float* initial;
    float* end;
    int values;  // value features of the CTA, without padding

    // CTAs have whole fragments: padding features read as zeros and are not written.
    KGEN_DEVICE bool has(int key, int value) const { return key < Keys && value < values; }
    KGEN_DEVICE float first(int key, int value) const {
        return has(key, value) ? initial[key * Values + value] : 0.0f;
    }
    KGEN_DEVICE void store_last(int key, int value, float x) const {
        if (has(key, value)) end[key * Values + value] = x;
    }
};

}  // namespace kgen
