// Gradients of a thread's segment of time, with the same instructions for all values. See gradients.cuh for the
// formulas.
//
// The gradient by (N, D) is a running state (m, a, b), too; it goes backward in time. The exponents of its terms are
// the negated exponents of the outputs' denominators. A segment's sum of these terms is a WholeSum, relative to the
// segment's first step.
#pragma once

#include "kgen/wkv4/gradients.cuh"
#include "kgen/wkv4/running_max.cuh"

namespace kgen::wkv4 {

// The values that a step's gradients need of the step's output and of the state before it.
struct StepOutput {
    float exponent;  // of the denominator, to base e
    float y, r;      // r: gy / (denominator * e^-exponent)
    float own;       // e^(u + k - exponent) r
    RunningState before;
};

// The output of a step, from the state before it. Advances the state past the step.
KGEN_DEVICE StepOutput step_output(RunningState& state, float decay, float k, float bonus, float v,
                                   float gy) {
    StepOutput found;
    found.before = state;
    const float shift = (k - state.m) + bonus;
    const float small = fast_exp2(-abs(shift * kLog2e));
    const bool rises = shift > 0.0f;
    const float old = rises ? small : 1.0f, now = rises ? 1.0f : small;
    const float inverse = fast_reciprocal(fma(old, state.b, now));
    found.exponent = larger(state.m, k + bonus);
    found.y = fma(old, state.a, now * v) * inverse;
    found.r = gy * inverse;
    found.own = now * found.r;
    state.step(decay, k, v);
    return found;
}

// The outputs of a segment, from the states before it. Advances the states past it. `Whole`: all steps exist; otherwise
// the first `count` do.
template <bool Whole, class T, int Width, int Steps>
KGEN_DEVICE void segment_step_outputs(StepOutput (&outputs)[Steps][Width],
                                      RunningState (&state)[Width],
                                      const ChannelExponents (&channel)[Width],
                                      const float (&bonus)[Width],
                                      const float (&keys)[Steps][Width],
                                      const Loaded<T, Width, Steps>& v,
                                      const Loaded<T, Width, Steps>& gy, int count) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (!Whole && i >= count) break;
        float values[Width], gys[Width];
        v.step[i].to_floats(values);
        gy.step[i].to_floats(gys);
#pragma unroll
        for (int j = 0; j < Width; ++j)
            outputs[i][j] = step_output(state[j], channel[j].decay, keys[i][j], bonus[j], values[j],
                                        gys[j]);
    }
}

// sums[j] <- the gradient by the (N, D) before the segment, of the outputs of the segment's steps only.
template <bool Whole, int Width, int Steps>
KGEN_DEVICE void sum_gradients(WholeSum<false> (&sums)[Width],
                               const ChannelExponents (&channel)[Width],
                               const StepOutput (&outputs)[Steps][Width], int count) {
    const auto exponent_of = [&](int i, int j) {
        const float own = -outputs[i][j].exponent;
        return i == 0 ? own : fma(channel[j].decay, static_cast<float>(i), own);
    };
    float top[Width];
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j] = {}, top[j] = kEmpty;
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (!Whole && i >= count) break;
#pragma unroll
        for (int j = 0; j < Width; ++j) top[j] = larger(top[j], exponent_of(i, j));
    }
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j].exponent = nearest_whole(top[j] * kLog2e);
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (!Whole && i >= count) break;
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float weight = fast_exp2(fma(exponent_of(i, j), kLog2e, -sums[j].exponent));
            const float r = weight * outputs[i][j].r;
            sums[j].a += r;
            sums[j].b = fma(-r, outputs[i][j].y, sums[j].b);
        }
    }
}

// Returns the gradients of a step, and adds to gw. `gradient`, by the (N, D) after the step, becomes the gradient by
// the (N, D) before it.
KGEN_DEVICE StepGradients step_back(RunningState& gradient, const StepOutput& output, float decay,
                                    float k, float v, float& gw) {
    const float later = fast_exp2((k + gradient.m) * kLog2e);
    const float gu = output.own * (v - output.y);
    const StepGradients found{fma(later, fma(v, gradient.a, gradient.b), gu),
                              fma(later, gradient.a, output.own), gu};
    const float kept = fast_exp2(((output.before.m + gradient.m) + decay) * kLog2e);
    gw = fma(kept, fma(output.before.a, gradient.a, output.before.b * gradient.b), gw);

    const float m = gradient.m + decay;
    const float shift = -output.exponent - m;
    add_shifted(gradient.a, gradient.b, output.r, -output.r * output.y, shift,
                fast_exp2(-abs(shift * kLog2e)));
    gradient.m = larger(m, -output.exponent);
    return found;
}

// Stores gk and gv of a segment from step t on, and adds to gw and gu. `gradient`, by the (N, D) after the segment,
// becomes the gradient by the (N, D) before it.
template <bool Whole, class T, int Width, int Steps>
KGEN_DEVICE void segment_gradients(RunningState (&gradient)[Width], float (&gw)[Width],
                                   float (&gu)[Width], const StepOutput (&outputs)[Steps][Width],
                                   const ChannelExponents (&channel)[Width],
                                   const float (&keys)[Steps][Width],
                                   const Loaded<T, Width, Steps>& v,
                                   const StepRows<T, Width>& gk_rows,
                                   const StepRows<T, Width>& gv_rows, i64 t, int count) {
    T* const gk_row = gk_rows.at(t);
    T* const gv_row = gv_rows.at(t);
#pragma unroll
    for (int i = Steps - 1; i >= 0; --i) {
        if (!Whole && i >= count) continue;
        float values[Width], gks[Width], gvs[Width];
        v.step[i].to_floats(values);
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const StepGradients found = step_back(gradient[j], outputs[i][j], channel[j].decay,
                                                  keys[i][j], values[j], gw[j]);
            gks[j] = found.gk;
            gvs[j] = found.gv;
            gu[j] += found.gu;
        }
        Words<T, Width>::from_floats(gks).store(gk_rows.behind(gk_row, i));
        Words<T, Width>::from_floats(gvs).store(gv_rows.behind(gv_row, i));
    }
}

// The gradient by the (N, D) after the last step. num and den of the stored final state are a and b of `state`, divided
// by its largest term `most`. The gradient by max is taken as 0; see the operator's doc.
template <bool Largest>
KGEN_DEVICE WholeSum<false> last_gradient(const float* gfinal_state, i64 column,
                                          const WholeSum<Largest>& state) {
    const float factor = state.most > 0.0f ? 1.0f / state.most : 1.0f;
    WholeSum<false> gradient{-state.exponent, factor * gfinal_state[column * 3],
                             factor * gfinal_state[column * 3 + 1]};
    // The exponent of an empty state is so large that adding to it has no effect.
    if (abs(state.exponent) < 1e7f) gradient.normalise(larger(abs(gradient.a), abs(gradient.b)));
    return gradient;
}

}  // namespace kgen::wkv4
