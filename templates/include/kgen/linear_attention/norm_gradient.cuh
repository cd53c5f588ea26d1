// The two factors of each step in the backward pass of linear attention, for block_per_head and low_occupancy.
//
//     out_t = scale * q_t S_t / norm_t   with   norm_t = scale * q_t z_t + eps   and   z_t = z_{t-1} + k_t
//
// The norm is the output of one more value feature whose v is 1. Its gradient is
// n_t = -(gout_t . out_t) / norm_t, which acts like one more column of gout.
#pragma once

#include "kgen/recurrent/recurrence.cuh"

namespace kgen {


// The two factors of a step: x multiplies gout, y belongs to the column of ones. Without a norm: x = scale, y = 0.
struct NormGradient {
    const float* norm;  // of a head, [T], or null
    const float* gout_dot_out;
    float scale;

    // x = scale / norm_t; y = scale * n_t.
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
