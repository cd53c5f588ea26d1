// The recurrence of wkv4. Per channel, with the log decay w:
//
//     y_t = (N + exp(u + k_t) v_t) / (D + exp(u + k_t))        N, D before step t
//     N <- exp(w) N + exp(k_t) v_t,  D <- exp(w) D + exp(k_t)
//
// A Pair (exponent, a, b) stands for (a e^exponent, b e^exponent); (N, D) is one. Its exponent is the largest of its
// terms', so weights are at most 1. Adding pairs is associative: segments of the steps can be summed separately.
// The gradients by N and D are a Pair too, whose recurrence goes backward in time.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"

namespace kgen::wkv4 {

// Exponent of an empty sum. Not -Inf, which would subtract from itself.
constexpr float kEmpty = -1e38f;

// The larger number; the other one if one is NaN.
KGEN_DEVICE float larger(float a, float b) {
#if KGEN_HOST
    return __builtin_fmaxf(a, b);
#else
    return ::fmaxf(a, b);
#endif
}

// The log decay of a w in the form `log` or `raw`.
template <DecayForm Form>
KGEN_DEVICE float log_decay(float w) {
    static_assert(Form != DecayForm::decay, "wkv4 takes the log decay or time_decay");
    return Form == DecayForm::raw ? -exp(w) : w;
}

// The derivative of the log decay by w. Where the decay is 0, it stays 0 nearby.
template <DecayForm Form>
KGEN_DEVICE float log_decay_slope(float decay) {
    return Form != DecayForm::raw ? 1.0f : decay == -infinity() ? 0.0f : decay;
}

// The log decay of several steps; 0 of none, also where the decay of a step is -Inf.
KGEN_DEVICE float decay_of_steps(float decay, int steps) {
    return steps == 0 ? 0.0f : decay * static_cast<float>(steps);
}

// Two sums with one scale; see above.
struct Pair {
    float exponent = kEmpty, a = 0.0f, b = 0.0f;

    // Adds (x, y) e^top; returns the factor of the earlier a and b. One of the two weights is 1, so there is one
    // exponential. NaN reaches a and b, never the exponent.
    KGEN_DEVICE float add(float top, float x, float y) {
        const float shift = top - exponent;
        const float small = fast_exp(-abs(shift));
        const bool rises = shift > 0.0f;
        const float old = rises ? small : 1.0f, now = rises ? 1.0f : small;
        exponent = larger(exponent, top);
        a = fma(old, a, now * x);
        b = fma(old, b, now * y);
        return old;
    }

    // Decays the sums by `decay`, then adds a later pair.
    KGEN_DEVICE void append(float decay, const Pair& later) {
        exponent += decay;
        add(later.exponent, later.a, later.b);
    }
};

// A step of the state; returns the factor of the earlier sums.
KGEN_DEVICE float step(Pair& state, float decay, float k, float v) {
    state.exponent += decay;
    return state.add(k, v, 1.0f);
}

// The output of a step.
struct Output {
    float exponent;  // of the denominator
    float y;
    float inverse;   // 1 / (the denominator * e^-exponent)
    float old;       // factor of the state's sums
};

// The output of a step, from the state before it.
KGEN_DEVICE Output output_of(Pair state, float key, float v) {
    const float old = state.add(key, v, 1.0f);
    const float inverse = fast_div(1.0f, state.b);
    return Output{state.exponent, state.a * inverse, inverse, old};
}

// The state before the first step: element `column` of [B * C, 3] (num, den, max), or empty if null.
KGEN_DEVICE Pair initial_pair(const float* states, i64 column) {
    if (states == nullptr) return Pair{};
    return Pair{states[column * 3 + 2], states[column * 3], states[column * 3 + 1]};
}

// Writes element `column` of [B * C, 3].
KGEN_DEVICE void store_state(float* states, i64 column, const Pair& state) {
    states[column * 3] = state.a;
    states[column * 3 + 1] = state.b;
    states[column * 3 + 2] = state.exponent;
}

// Pairs in a workspace [rows, 3, C].
struct PairRows {
    float* memory;
    i64 C;

    KGEN_DEVICE Pair get(i64 row, i64 c) const {
        const float* at = memory + row * 3 * C + c;
        return Pair{at[0], at[C], at[2 * C]};
    }
    KGEN_DEVICE void put(i64 row, i64 c, const Pair& pair) const {
        float* at = memory + row * 3 * C + c;
        at[0] = pair.exponent;
        at[C] = pair.a;
        at[2 * C] = pair.b;
    }
};

}  // namespace kgen::wkv4
