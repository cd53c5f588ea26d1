// What the kernels of linear attention share beside the walk over time.
#pragma once

#include "recurrence.cuh"

namespace kgen {


// What a backward pass multiplies with at a step. The norm is the output for one more value of ones:
// its gradient, n, acts like one more column of gout. Without a norm: x = scale, y = 0.
struct NormGradient {
    const float* norm;  // of a head, [T]; null: none
    const float* gout_dot_out;
    float scale;

    // x: what gout is multiplied by; y: scale * n.
    KGEN_DEVICE f32x2 operator()(i64 t) const {
        if (norm == nullptr) return f32x2{scale, 0.0f};
        const float factor = scale / norm[t];
        return f32x2{factor, -gout_dot_out[t] * factor};
    }
};

KGEN_DEVICE NormGradient norm_gradient(const float* norm, const float* gout_dot_out, i64 offset,
                                       float scale) {
    if (norm == nullptr) return NormGradient{nullptr, nullptr, scale};
    return NormGradient{norm + offset, gout_dot_out + offset, scale};
}

}  // namespace kgen
