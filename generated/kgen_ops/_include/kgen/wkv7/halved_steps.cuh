// Which steps a lane has in a chunk of 16 steps that is halved down to adjacent steps, and the sums of gw.
//
// Blocks of 16, 8, 4 and 2 steps have an early and a late half; a pair of steps belongs to the level where they are in
// different halves. Its factor is the product of the decays from after the early step to the middle, times the product
// of those from the middle to before the late step: no quotient is formed, and all factors are at most 1.
//
// Layout: step t lies in slot t, or from t = 8 on in slot 23 - t. A lane has keys g and g + 8 and the steps of slots
// 2q, 2q + 1 (half 0) and 8 + 2q, 9 + 2q (half 1), which are two steps and their complements: [half][2 * key + step],
// the order of accumulators. At every level two of a lane's steps are thus early and two late.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/mma.cuh"

namespace kgen::wkv7 {

// The step in a slot, and the slot of a step.
KGEN_DEVICE int slot_step(int slot) { return slot < 8 ? slot : 23 - slot; }

// The descend functions take functions of (half, i): `ahead` and `back` are the sums of gw that a step's block passes
// to later steps, and to earlier steps.
struct HalvedSteps {
    using Half = float[4];      // of a lane: [2 * key + step]
    using Steps = float[2][4];  // both halves

    Steps gw;
    bool flip_near, flip_wide;  // whether half 0 is late in blocks of 4, and of 8 steps

    KGEN_DEVICE void set_flips() {
        const int q = mma_lane().q;
        flip_near = (q & 1) != 0;
        flip_wide = (q & 2) != 0;
    }

    // Adds the sums of gw that cross the middle of the chunk.
    template <class Ahead, class Back>
    KGEN_DEVICE void descend_from_chunk(Ahead ahead, Back back) {
#pragma unroll
        for (int key = 0; key < 2; ++key) {
            float early = ahead(0, 2 * key) + ahead(0, 2 * key + 1);
            float late = back(1, 2 * key) + back(1, 2 * key + 1);
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2) {
                early += shfl_xor(early, lanes);
                late += shfl_xor(late, lanes);
            }
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                gw[0][2 * key + step] += late;
                gw[1][2 * key + step] += early;
            }
        }
    }

    // The same from half to half of blocks of 2 * kHalf steps.
    template <int kHalf, class Ahead, class Back>
    KGEN_DEVICE void descend(Ahead ahead, Back back) {
#pragma unroll
        for (int key = 0; key < 2; ++key)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = 2 * key;
                if constexpr (kHalf == 1) {
                    gw[half][i + 1 - half] += ahead(half, i + half);
                    gw[half][i + half] += back(half, i + 1 - half);
                } else {
                    const bool is_late = (kHalf == 4 ? flip_wide : flip_near) == (half == 0);
                    float sum = is_late ? back(half, i) + back(half, i + 1)
                                        : ahead(half, i) + ahead(half, i + 1);
                    if constexpr (kHalf == 4) sum += shfl_xor(sum, 1);
                    sum = shfl_xor(sum, kHalf / 2);
                    gw[half][i] += sum;
                    gw[half][i + 1] += sum;
                }
            }
    }

    // Whether half 0 is late in blocks of 2 * kHalf steps.
    template <int kHalf>
    KGEN_DEVICE bool flip() const {
        return kHalf == 4 ? flip_wide : kHalf == 2 && flip_near;
    }

    // Add x to element i of the late, or early, steps of a level. share: 0 if flip, else 1; other: 1 - share.
    template <int kHalf>
    static KGEN_DEVICE void add_late(float share, float other, int i, Steps& to, float x) {
        if constexpr (kHalf == 1) {
            to[i % 2][i / 2 * 2 + 1 - i % 2] += x;
        } else {
            if (kHalf < 8) to[0][i] = fma(other, x, to[0][i]);
            to[1][i] = fma(share, x, to[1][i]);
        }
    }
    template <int kHalf>
    static KGEN_DEVICE void add_early(float share, float other, int i, Steps& to, float x) {
        if constexpr (kHalf == 1) {
            to[i % 2][i / 2 * 2 + i % 2] += x;
        } else {
            to[0][i] = fma(share, x, to[0][i]);
            if (kHalf < 8) to[1][i] = fma(other, x, to[1][i]);
        }
    }
};

}  // namespace kgen::wkv7
