// Gradients of a thread's segment of time from the weights of its forward steps, with the same instructions for all
// values.
//
// A step of a state (m, a, b) is a <- forget a + input v, b <- forget b + input, with forget = e^(m + w - m') and
// input = e^(k - m'), one of them 1. The gradient (ga, gb) by the state's own a and b, in units of e^-m, goes backward
// by the same weights, so that it needs no exponential and no running maximum:
//
//     gk = own (v - y) + input (v ga + gb)       gv = own + input ga      gw = sum of forget (a ga + b gb)
//     ga <- forget ga + r                        gb <- forget gb - r y
//
// r is gy / (denominator e^-m) and own is e^(u + k - m) r. A state's b is at least 1, so that |r| <= |gy| and the
// gradient does not overflow.
//
// Between segments a gradient is in units of 2^-E, where E is the whole exponent of the state there, and decays by the
// segment's exact decay. The product of a segment's weights is not used instead: the sum m + w rounds in the same
// direction at every step, so that the error of the product would grow with T.
#pragma once

#include "kgen/wkv4/gradients.cuh"
#include "kgen/wkv4/running_max.cuh"

namespace kgen::wkv4 {

// log2 of the largest weight of a step's own term, relative to its state. A larger weight is clamped, because its
// reciprocal must be a normal number. The excess that the state then contributes is below the smallest normal number.
constexpr float kMostOwnRatio = 125.0f;

// What the gradients of a step need.
struct WeightedStep {
    float y, r, own;
    float forget, input;  // of the state's step
    float a, b;           // of the state before the step
};

// The output of a step, from the state before it. Advances the state past the step.
KGEN_DEVICE WeightedStep weighted_step(RunningState& state, const ChannelExponents& channel,
                                       float k, float v, float gy) {
    WeightedStep found;
    found.a = state.a;
    found.b = state.b;
    const float ratio = fma(k - state.m, kLog2e, channel.bonus_log2);
    const float weight = fast_exp2(smaller_or_nan(ratio, kMostOwnRatio));
    const float inverse = fast_reciprocal(state.b + weight);
    const float share = weight * inverse;  // of the step's own value in y
    found.y = fma(share, v, state.a * inverse);
    found.r = gy * inverse;
    found.own = gy * share;

    const float kept = state.m + channel.decay;
    const float shift = k - kept;
    const float small = fast_exp2(-abs(shift * kLog2e));
    const bool rises = shift > 0.0f;
    found.forget = rises ? small : 1.0f;
    found.input = rises ? 1.0f : small;
    state.a = fma(found.forget, state.a, found.input * v);
    state.b = fma(found.forget, state.b, found.input);
    state.m = larger(kept, k);
    return found;
}

// Computes the steps of a segment from the states before it, and advances the states past it. Steps from `count` on do
// not exist; their k, v and gy are 0, so that they add nothing to a gradient of 0. `Final`: the final state has a
// gradient. Steps that do not exist then leave a state and its gradient as they are.
template <bool Final, class T, int Width, int Steps>
KGEN_DEVICE void segment_weighted_steps(WeightedStep (&found)[Steps][Width],
                                        RunningState (&state)[Width],
                                        const ChannelExponents (&channel)[Width],
                                        const Loaded<T, Width, Steps>& k,
                                        const Loaded<T, Width, Steps>& v,
                                        const Loaded<T, Width, Steps>& gy, int count) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        float keys[Width], values[Width], gys[Width];
        k.step[i].to_floats(keys);
        v.step[i].to_floats(values);
        gy.step[i].to_floats(gys);
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            ChannelExponents own = channel[j];
            if (Final && i >= count) {
                keys[j] = kEmpty;
                own.decay = 0.0f;
            }
            found[i][j] = weighted_step(state[j], own, keys[j], values[j], gys[j]);
        }
    }
}

// The gradient by a state's a and b, in units of e^-m. step_back() turns the gradient after a step into the gradient
// before it.
struct StateGradient {
    float a = 0.0f, b = 0.0f;

    KGEN_DEVICE void step_back(const WeightedStep& step) {
        a = fma(step.forget, a, step.r);
        b = fma(step.forget, b, -step.r * step.y);
    }
    // Turns the gradient after a segment into the gradient before it. `sum`: what the segment's own steps add.
    // `change`: the exponent of the state before the segment minus the exponent of the state after it.
    KGEN_DEVICE void prepend(const WholeDecay& decay, float change, const StateGradient& sum) {
        const float kept = fast_exp2(smaller(change + decay.whole, 126.0f)) * decay.factor;
        a = fma(kept, a, sum.a);
        b = fma(kept, b, sum.b);
    }
};

// Computes gk and gv of a step from the gradient after the step, and adds to gw and gu.
KGEN_DEVICE void gradients_of(float& gk, float& gv, float& gw, float& gu, const WeightedStep& step,
                              float v, const StateGradient& after) {
    const float own = step.own * (v - step.y);
    gk = fma(step.input, fma(v, after.a, after.b), own);
    gv = fma(step.input, after.a, step.own);
    gu += own;
    gw = fma(step.forget, fma(step.a, after.a, step.b * after.b), gw);
}

// sums[j] <- the gradient before a segment, of the segment's own steps only.
template <int Width, int Steps>
KGEN_DEVICE void sum_weighted_steps(StateGradient (&sums)[Width],
                                    const WeightedStep (&steps)[Steps][Width]) {
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j] = {};
#pragma unroll
    for (int i = Steps - 1; i >= 0; --i) {
#pragma unroll
        for (int j = 0; j < Width; ++j) sums[j].step_back(steps[i][j]);
    }
}

// The segments of a round in shared memory, float [slots][3][columns]: first each segment's sum and change of the
// exponent, later the gradient after the segment. Channel j of lane l has column j * lanes + l.
template <int Columns>
struct GradientSlots {
    float* memory;

    KGEN_DEVICE float* at(int slot, int column) const {
        return memory + slot * 3 * Columns + column;
    }
    // `change`: the exponent of the state before the segment minus the exponent of the state after it.
    KGEN_DEVICE void put(int slot, int column, const StateGradient& sum, float change) const {
        put_gradient(slot, column, sum);
        at(slot, column)[2 * Columns] = change;
    }
    KGEN_DEVICE void put_gradient(int slot, int column, const StateGradient& gradient) const {
        at(slot, column)[0] = gradient.a;
        at(slot, column)[Columns] = gradient.b;
    }
    KGEN_DEVICE StateGradient gradient(int slot, int column) const {
        return {at(slot, column)[0], at(slot, column)[Columns]};
    }
    // Replaces the sum of a segment by `after`, the gradient after the segment, and turns `after` into the gradient
    // before it. The state after steps that do not exist is unrelated to the state before them. The gradient there is
    // 0, and stays 0 because its factor is finite.
    KGEN_DEVICE void go_back(StateGradient& after, const WholeDecay& decay, int slot,
                             int column) const {
        const StateGradient sum = gradient(slot, column);
        const float change = at(slot, column)[2 * Columns];
        put_gradient(slot, column, after);
        after.prepend(decay, change, sum);
    }
};

// States before a segment, and the exponents of the states after it.
template <int Width>
struct SegmentStates {
    WholeSum<false> before[Width];
    float next[Width];

    // `row`: the segment's row. The row after the last segment has the final gradient, whose exponent is negated, or
    // nothing.
    KGEN_DEVICE void load(const WholeRows<>& rows, i64 row, i64 c, bool last, bool final_gradient) {
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            before[j] = rows.get(row, c + j);
            next[j] = 0.0f;
            if (!last || final_gradient) {
                const float exponent = rows.exponent(row + 1, c + j);
                next[j] = last ? -exponent : exponent;
            }
        }
    }
};

// Converts a gradient from units of 2^-exponent to units of e^-m.
KGEN_DEVICE StateGradient in_units_of(float m, const StateGradient& gradient, float exponent) {
    const float change = fma(m, kLog2e, -exponent) + m * kLog2eLow;
    const float units = fast_exp2(smaller(change, 126.0f));
    return {units * gradient.a, units * gradient.b};
}

// Loads a segment, of which all steps exist, from `row` on.
template <class T, int Width, int Steps>
KGEN_DEVICE void load_whole(Loaded<T, Width, Steps>& steps, const StepRows<const T, Width>& rows,
                            const T* row) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        steps.step[i].load(row);
        row += rows.stride;
    }
}

// Stores gk and gv of a segment from step t on, and adds to gw and gu. The gradients after the segment become the
// gradients before it.
template <bool Whole, class T, int Width, int Steps>
KGEN_DEVICE void segment_weighted_gradients(StateGradient (&gradient)[Width], float (&gw)[Width],
                                            float (&gu)[Width],
                                            const WeightedStep (&steps)[Steps][Width],
                                            const Loaded<T, Width, Steps>& v,
                                            const StepRows<T, Width>& gk_rows,
                                            const StepRows<T, Width>& gv_rows, i64 t, int count) {
    // Each row's address is computed from the address of the row after it, in two instructions; from a multiple of the
    // stride it would take five.
    T* gk_row = gk_rows.at(t + Steps);
    T* gv_row = gv_rows.at(t + Steps);
#pragma unroll
    for (int i = Steps - 1; i >= 0; --i) {
        gk_row -= gk_rows.stride;
        gv_row -= gv_rows.stride;
        if (!Whole && i >= count) continue;
        float values[Width], gks[Width], gvs[Width];
        v.step[i].to_floats(values);
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            gradients_of(gks[j], gvs[j], gw[j], gu[j], steps[i][j], values[j], gradient[j]);
            gradient[j].step_back(steps[i][j]);
        }
        Words<T, Width>::from_floats(gks).store(gk_row);
        Words<T, Width>::from_floats(gvs).store(gv_row);
    }
}

}  // namespace kgen::wkv4
