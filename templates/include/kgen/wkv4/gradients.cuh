// Gradients of a step of wkv4, and sums of partial gradients over the batch.
//
//     r_t = gy_t / (denominator of y_t)
//     G <- e^w G + (r_t, -r_t y_t)        G: the gradient by (N, D), backward in time
//     gv_t = e^(u + k) r_t + e^k G.a      gk_t = e^(u + k) r_t (v_t - y_t) + e^k (v_t G.a + G.b)
#pragma once

#include "kgen/wkv4/pair.cuh"

namespace kgen::wkv4 {

// The gradient by the (N, D) after the last step, from the gradients by the stored num and den, which are in units of
// e^max. The gradient by max is taken as 0; see the operator's doc.
KGEN_DEVICE Pair final_gradient(const float* gfinal_state, i64 column, const Pair& state) {
    if (gfinal_state == nullptr) return Pair{};
    return Pair{-state.exponent, gfinal_state[column * 3], gfinal_state[column * 3 + 1], -state.low};
}

// Returns e^(exponent of `one` + exponent of `other`). The exponents may be large and of opposite signs.
KGEN_DEVICE float exp_of_sum(const Pair& one, const Pair& other) {
    return fast_exp((one.exponent + other.exponent) + (one.low + other.low));
}

// Stores the gradient by the initial state (num, den, max), given the gradient by (N, D).
KGEN_DEVICE void store_initial_gradient(float* ginitial_state, i64 column, const Pair& state,
                                        const Pair& gradient) {
    // For a large negative argument fast_exp loses as many bits as the argument has before the binary point.
    const float factor =
        exp((state.exponent + gradient.exponent) + (state.low + gradient.low));
    const float num = factor * gradient.a, den = factor * gradient.b;
    store_state(ginitial_state, column, Pair{fma(state.a, num, state.b * den), num, den});
}

// The part of a step's output that the step's gradients need.
struct OutputGradient {
    float exponent, low, y, r;

    // Turns the gradient by the state after the step into the gradient by the state before it.
    KGEN_DEVICE void step_back(Pair& gradient, float decay) const {
        gradient.decay_by(LogDecay{decay});
        gradient.add(-exponent, -low, r, -r * y);
    }
};

// Gradients of one step.
struct StepGradients {
    float gk, gv, gu;
};

// Returns the gradients of a step. `after`: the gradient by the state after the step. The arguments of both
// exponentials are at most 0, except for rounding.
KGEN_DEVICE StepGradients step_gradients(const OutputGradient& output, const Pair& after, float k,
                                         float u, float v) {
    const float own = fast_exp((u + k - output.exponent) - output.low) * output.r;
    const float later = fast_exp((k + after.exponent) + after.low);
    const float gu = own * (v - output.y);
    return StepGradients{fma(later, fma(v, after.a, after.b), gu), fma(later, after.a, own), gu};
}

// The derivatives of (N, D) by the log decay, in the scale of a state.
//
//     gw = sum over t of r_t (N' - y_t D') + (N', D') . G
//
// In the sum N' and D' are those before step t, in the product with G those after the last step. A segment of the steps
// begins with N' = D' = 0: the gradients of earlier segments contain what the state before the segment contributes.
struct DecayDerivative {
    float a = 0.0f, b = 0.0f;

    // The term r_t (N' - y_t D') of a step's output. Not called for a segment's first step: the term is 0 there, and
    // must be 0 even if r_t is NaN, because y_0 does not depend on the decay.
    KGEN_DEVICE float by_output(const Output& output, float r) const {
        return r * output.old * fma(-output.y, b, a);
    }
    // Advances past a step. `old`: the factor by which the step multiplies the sums of `before`, the state before it.
    KGEN_DEVICE void step(float old, const Pair& before) {
        a = old * (a + before.a);
        b = old * (b + before.b);
    }
    // (N', D') . G at the end of a segment.
    KGEN_DEVICE float by_state(const Pair& state, const Pair& gradient) const {
        return exp_of_sum(state, gradient) * fma(a, gradient.a, b * gradient.b);
    }
};

// Returns the sum of column c of parts [rows, C], in the order of the rows.
KGEN_DEVICE float sum_of_rows(const float* parts, i64 rows, i64 C, i64 c) {
    CompensatedSum sum;
#pragma unroll 4
    for (i64 row = 0; row < rows; ++row) sum.add(parts[row * C + c]);
    return sum.value();
}

// Computes gw and gu from the partial sums of the batch rows, one thread per channel.
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
