// Gradients of a step of wkv4, and sums of partial gradients over the batch.
//
//     r_t = gy_t / (denominator of y_t)
//     G <- e^w G + (r_t, -r_t y_t)        G: the gradient by (N, D), backward in time
//     gv_t = e^(u + k) r_t + e^k G.a      gk_t = e^(u + k) r_t (v_t - y_t) + e^k (v_t G.a + G.b)
#pragma once

#include "kgen/wkv4/pair.cuh"

namespace kgen::wkv4 {

// The gradient by (N, D) after the last step: by the stored num and den, whose unit is e^max. The gradient by max
// counts as 0; see the operator's doc.
KGEN_DEVICE Pair final_gradient(const float* gfinal_state, i64 column, const Pair& state) {
    if (gfinal_state == nullptr) return Pair{};
    return Pair{-state.exponent, gfinal_state[column * 3], gfinal_state[column * 3 + 1], -state.low};
}

// e^(the sum of two exponents), which may be large and of opposite signs.
KGEN_DEVICE float exp_of_sum(const Pair& one, const Pair& other) {
    return fast_exp((one.exponent + other.exponent) + (one.low + other.low));
}

// The gradient by the stored initial state (num, den, max), from the one by (N, D).
KGEN_DEVICE void store_initial_gradient(float* ginitial_state, i64 column, const Pair& state,
                                        const Pair& gradient) {
    // Of large negative arguments fast_exp loses as many bits as they have before the point.
    const float factor =
        exp((state.exponent + gradient.exponent) + (state.low + gradient.low));
    const float num = factor * gradient.a, den = factor * gradient.b;
    store_state(ginitial_state, column, Pair{fma(state.a, num, state.b * den), num, den});
}

// What the gradients of a step need of its output.
struct OutputGradient {
    float exponent, low, y, r;

    // Goes on to the gradient by the state before the step.
    KGEN_DEVICE void step_back(Pair& gradient, float decay) const {
        gradient.decay_by(LogDecay{decay});
        gradient.add(-exponent, -low, r, -r * y);
    }
};

// Gradients of one step.
struct StepGradients {
    float gk, gv, gu;
};

// From the gradient by the state after the step. Both exponents are at most 0, but for rounding.
KGEN_DEVICE StepGradients step_gradients(const OutputGradient& output, const Pair& after, float k,
                                         float u, float v) {
    const float own = fast_exp((u + k - output.exponent) - output.low) * output.r;
    const float later = fast_exp((k + after.exponent) + after.low);
    const float gu = own * (v - output.y);
    return StepGradients{fma(later, fma(v, after.a, after.b), gu), fma(later, after.a, own), gu};
}

// The derivatives of (N, D) by the log decay, in the scale of a state.
//
//     gw = sum over t of r_t (N' - y_t D') + (N', D') . G        N', D' before step t; after the last step
//
// A segment of the steps begins with 0: what its first state adds is in the gradients of earlier segments.
struct DecayDerivative {
    float a = 0.0f, b = 0.0f;

    // r_t (N' - y_t D'), of the output of a step. Not for a segment's first step: there it is 0, and must be also
    // where r_t is NaN, because y_0 does not depend on the decay.
    KGEN_DEVICE float by_output(const Output& output, float r) const {
        return r * output.old * fma(-output.y, b, a);
    }
    // Advances past a step: `old` is the factor of the sums of the state before it.
    KGEN_DEVICE void step(float old, const Pair& before) {
        a = old * (a + before.a);
        b = old * (b + before.b);
    }
    // (N', D') . G at the end of a segment.
    KGEN_DEVICE float by_state(const Pair& state, const Pair& gradient) const {
        return exp_of_sum(state, gradient) * fma(a, gradient.a, b * gradient.b);
    }
};

// The sum over rows of parts [rows, C], in their order.
KGEN_DEVICE float sum_of_rows(const float* parts, i64 rows, i64 C, i64 c) {
    CompensatedSum sum;
#pragma unroll 4
    for (i64 row = 0; row < rows; ++row) sum.add(parts[row * C + c]);
    return sum.value();
}

// gw and gu of the channels, a thread each, from the parts of batch rows.
template <DecayForm Form, int Threads, class W, class U>
KGEN_DEVICE void reduce_batch(const W* w, const float* gw_parts, const float* gu_parts, W* gw, U* gu,
                              i64 B, i64 C) {
    const i64 c = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x;
    if (c >= C) return;
    const float slope = log_decay_slope<Form>(log_decay<Form>(to_float(w[c])));
    gw[c] = from_float<W>(slope * sum_of_rows(gw_parts, B, C, c));
    gu[c] = from_float<U>(sum_of_rows(gu_parts, B, C, c));
}

}  // namespace kgen::wkv4
