// The recurrence of wkv4. Per channel, with the log decay w:
//
//     y_t = (N + exp(u + k_t) v_t) / (D + exp(u + k_t))        N, D before step t
//     N <- exp(w) N + exp(k_t) v_t,  D <- exp(w) D + exp(k_t)
//
// (N, D) is stored as a Pair (exponent, a, b), which stands for (a e^exponent, b e^exponent). The exponent of a Pair is
// the largest exponent of its terms, so weights are at most 1. Adding pairs is associative: segments of the steps can
// be summed separately. The gradients by N and D are a Pair too, whose recurrence goes backward in time.
//
// After T steps of log decay w an exponent is near T w, and a factor is the exponential of a small difference of two
// such exponents. In the backward pass the exponents of state and gradient are summed in different orders, so the
// rounding error of T w would become the relative error of the gradient by the initial state. Backward, an exponent is
// therefore the sum of two floats. In the forward pass the output of a step compares exponents that were summed in the
// same order, whose errors cancel: forward needs one float.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"

namespace kgen::wkv4 {

// Exponent of an empty sum. It is not -Inf, because -Inf - (-Inf) is NaN.
constexpr float kEmpty = -1e38f;

// The log decay of a w in the form `log` or `raw`.
template <DecayForm Form>
KGEN_DEVICE float log_decay(float w) {
    static_assert(Form != DecayForm::decay, "wkv4 takes the log decay or time_decay");
    return Form == DecayForm::raw ? -exp(w) : w;
}

// The derivative of the log decay by w. Where the decay is 0, the derivative is 0: the decay stays 0 for nearby w.
template <DecayForm Form>
KGEN_DEVICE float log_decay_slope(float decay) {
    return Form != DecayForm::raw ? 1.0f : decay == -infinity() ? 0.0f : decay;
}

// A log decay as the sum of two floats.
struct LogDecay {
    float high, low = 0.0f;
};

// Returns `error`, the rounding error of an operation, or 0 where the operation's result is not finite.
KGEN_DEVICE float rounding_of(float result, float error) {
    return abs(result) < infinity() ? error : 0.0f;
}

// The log decay of several steps. For 0 steps it is 0, even if the log decay of a step is -Inf.
KGEN_DEVICE LogDecay decay_of_steps(float decay, i64 steps) {
    if (steps == 0) return LogDecay{0.0f};  // untested: a single segment has steps
    const float product = decay * static_cast<float>(steps);
    return LogDecay{product, rounding_of(product, fma(decay, static_cast<float>(steps), -product))};
}

// Two sums with one scale; see above. `TwoParts`: whether the exponent is the sum of two floats.
template <bool TwoParts>
struct PairOf {
    static constexpr int kFloats = TwoParts ? 4 : 3;  // in memory

    float exponent = kEmpty, a = 0.0f, b = 0.0f;
    float low = 0.0f;  // the exponent's second part

    KGEN_DEVICE void decay_by(const LogDecay& decay) {
        if constexpr (!TwoParts) {
            exponent += decay.high;
            return;
        }
        const float sum = exponent + decay.high;
        const float added = sum - exponent;  // the part of decay.high that is in the sum
        const float error = (exponent - (sum - added)) + (decay.high - added);
        low += rounding_of(sum, error) + decay.low;
        exponent = sum;
    }

    // Adds (x, y) e^(top + top_low); returns the factor by which it multiplied the earlier a and b. One of the two
    // weights is 1, so there is one exponential. NaN reaches a and b, never the exponent.
    KGEN_DEVICE float add(float top, float top_low, float x, float y) {
        const float shift = (top - exponent) + (top_low - low);
        const float small = fast_exp(-abs(shift));
        const bool rises = shift > 0.0f;
        const float old = rises ? small : 1.0f, now = rises ? 1.0f : small;
        exponent = rises ? top : exponent;
        low = rises ? top_low : low;
        a = fma(old, a, now * x);
        b = fma(old, b, now * y);
        return old;
    }

    // Decays the sums by `decay`, then adds a later pair.
    KGEN_DEVICE void append(const LogDecay& decay, const PairOf& later) {
        decay_by(decay);
        add(later.exponent, later.low, later.a, later.b);
    }
};

using Pair = PairOf<true>;  // of the backward pass

// Advances the state past a step; returns the factor by which `add` multiplied the earlier sums.
template <bool TwoParts>
KGEN_DEVICE float step(PairOf<TwoParts>& state, float decay, float k, float v) {
    state.decay_by(LogDecay{decay});
    return state.add(k, 0.0f, v, 1.0f);
}

// The output of a step.
struct Output {
    float exponent, low;  // of the denominator, two parts
    float y;
    float inverse;        // 1 / (the denominator * e^-exponent)
    float old;            // factor of the state's sums
};

// The output of a step, from the state before it.
template <bool TwoParts>
KGEN_DEVICE Output output_of(PairOf<TwoParts> state, float key, float v) {
    const float old = state.add(key, 0.0f, v, 1.0f);
    const float inverse = fast_div(1.0f, state.b);
    return Output{state.exponent, state.low, state.a * inverse, inverse, old};
}

// The state before the first step: element `column` of [B * C, 3] (num, den, max), or an empty pair if `states` is
// null.
template <bool TwoParts>
KGEN_DEVICE PairOf<TwoParts> initial_pair(const float* states, i64 column) {
    if (states == nullptr) return {};
    return {states[column * 3 + 2], states[column * 3], states[column * 3 + 1]};
}

// Writes element `column` of [B * C, 3].
template <bool TwoParts>
KGEN_DEVICE void store_state(float* states, i64 column, const PairOf<TwoParts>& state) {
    states[column * 3] = state.a;
    states[column * 3 + 1] = state.b;
    states[column * 3 + 2] = state.exponent + state.low;
}

// Pairs in a workspace [rows, kFloats, C].
template <bool TwoParts>
struct PairRows {
    using P = PairOf<TwoParts>;

    float* memory;
    i64 C;

    KGEN_DEVICE P get(i64 row, i64 c) const {
        const float* at = memory + row * P::kFloats * C + c;
        return P{at[0], at[C], at[2 * C], TwoParts ? at[3 * C] : 0.0f};
    }
    KGEN_DEVICE void put(i64 row, i64 c, const P& pair) const {
        float* at = memory + row * P::kFloats * C + c;
        at[0] = pair.exponent;
        at[C] = pair.a;
        at[2 * C] = pair.b;
        if constexpr (TwoParts) at[3 * C] = pair.low;
    }
};

}  // namespace kgen::wkv4
