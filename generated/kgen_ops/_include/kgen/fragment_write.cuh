// A fragment of 16 steps of the outputs of a linear recurrence, from the accumulators of a warp to memory.
#pragma once

#include "chunk_place.cuh"
#include "chunk_rows.cuh"
#include "math.cuh"

namespace kgen {

// Scale and write the rows of a fragment, which begins at step `first`; `left` of them exist. sums: tiles
// of 8 value features. What is not finite makes the result NaN.
template <class T, int Values, int Slice>
KGEN_DEVICE float write_fragment(float (&sums)[Slice / 8][4], const WalkRows<T>& rows, i64 first,
                                 int left) {
    constexpr int kPairs = Slice / 16;
    float poison[4] = {};  // chains that do not wait for each other
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sums[n][i] *= rows.out_factor;
            poison[i] = fma(sums[n][i], 0.0f, poison[i]);
        }
    const MmaLane lane = mma_lane();
    if constexpr (Values % 4 == 0) {
        Vec<u32, 2> quads[2][kPairs];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
                quads[half][n] = quad_of_row<T>(sums[2 * n], sums[2 * n + 1], half);
        const int column = column_of_quad();
        T* row = rows.out.at(first + lane.g) + column;
        const i64 below = 8 * rows.out.stride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (lane.g + 8 * half >= left) break;
#pragma unroll
            for (int n = 0; n < kPairs; ++n)
                if (Values % Slice == 0 || 16 * n + column < rows.values)
                    *reinterpret_cast<Vec<u32, 2>*>(row + half * below + 16 * n) = quads[half][n];
        }
    } else {
#pragma unroll
        for (int n = 0; n < 2 * kPairs; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int step = lane.g + i / 2 * 8, value = 8 * n + 2 * lane.q + i % 2;
                if (step < left && value < rows.values)
                    rows.out.at(first + step)[value] = from_float<T>(sums[n][i]);
            }
    }
    return poison[0] + poison[1] + (poison[2] + poison[3]);
}

}  // namespace kgen
