// The inverse of a unit triangular matrix of 16 steps, exactly: by substitution in fp32.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen::wkv7 {

// Each lane computes column `column` of (I - L)^-1 in `found`. L lies in shared memory, `stride` floats from row to
// row; it is strictly lower triangular, or with Upper strictly upper triangular. All lanes read the same words.
template <bool Upper>
KGEN_DEVICE void inverse_column(const float* triangle, int stride, int column, float (&found)[16]) {
#pragma unroll
    for (int step = 0; step < 16; ++step) {
        const int i = Upper ? 15 - step : step;
        float sums[2] = {i == column ? 1.0f : 0.0f, 0.0f};
#pragma unroll
        for (int known = 0; known < step; ++known) {
            const int j = Upper ? 15 - known : known;
            sums[known % 2] = fma(triangle[i * stride + j], found[j], sums[known % 2]);
        }
        found[i] = sums[0] + sums[1];
    }
}

// Each lane computes column `column` of (I - L)^-1 - I. L is zero on its diagonal and above, in memory too.
KGEN_DEVICE void strict_inverse_column(const float* triangle, int stride, int column, float (&found)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) found[i] = i == 0 ? 0.0f : triangle[i * stride + column];
    // Once an element is complete, its products are added to all later elements: dependent chains are as short as they
    // can be.
#pragma unroll
    for (int j = 1; j < 15; ++j)
#pragma unroll
        for (int i = j + 1; i < 16; ++i) found[i] = fma(triangle[i * stride + j], found[j], found[i]);
}

}  // namespace kgen::wkv7
