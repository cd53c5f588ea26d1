// Gradients of a thread's segment of time whose steps have weights relative to one anchor, a whole exponent:
//
//     weight = 2^(log2e k - anchor)      a <- e^w a + weight v      b <- e^w b + weight
//
// States within the segment have the unit 2^anchor, gradients by them 2^-anchor. The decay of a step is then a constant
// of the channel, and all of the segment takes one exponential and one reciprocal for a step:
//
//     q = e^u weight        denominator b + q        y = (a + q v) / (b + q)        r = gy / (b + q)
//     gv = weight (ga + e^u r)        gk = weight (v ga + gb + e^u r (v - y))       gw = sum of a ga + b gb, times e^w
//     ga <- e^w ga + r                gb <- e^w gb - r y
//
// The anchor is the largest exponent of a step, its bonus counted. Where exponents are more than kNear apart it is
// lower, so that the smallest weights are normal numbers, and where they are more than kFar apart, or keys are infinite
// or all NaN, the channel is `apart`: it is computed step by step (SeparateSteps), at other costs, by the same states.
// What else is computed for such a channel is a number without a meaning, and is not used.
//
// A state before the segment that outweighs the anchor by more than 2^kMostState moves the anchor up: weights that then
// underflow are too small to count. Where the decay of a segment is so strong that they may count at its end, the
// channel is apart, too. A state that is smaller than all weights is 0.
#pragma once

#include "kgen/wkv4/weighted_gradients.cuh"

namespace kgen::wkv4 {

constexpr float kNear = 90.0f;       // log2 of the ratio of two weights
constexpr float kFar = 130.0f;
constexpr float kMostState = 40.0f;   // log2 of the state before a segment, relative to the anchor
constexpr float kLasting = -60.0f;    // log2 of a segment's decay
constexpr float kMostBonusLog2 = 60.0f;

// What the segments of a channel share.
struct AnchoredChannel {
    float decay;        // e^w
    float bonus;        // e^u
    float above, below;  // what u adds to the largest and to the smallest exponent
    bool lasting;        // a state before a segment outweighs steps at its end, too

    KGEN_DEVICE void set(float w, float u, int steps) {
        const WholeDecay step = WholeDecay::of(w, 1);
        lasting = w * (kLog2e * static_cast<float>(steps)) >= kLasting;
        decay = step.factor * exp2(step.whole);
        const float exponent = u * kLog2e;
        bonus = exp(u);
        above = larger(exponent, 0.0f);
        below = abs(exponent) > kMostBonusLog2 ? -infinity() : smaller(exponent, 0.0f);
    }
};

// `Steps` steps of a tensor of a block in shared memory, rows of `Pitch` elements, at a thread's channels.
template <class T, int Width, int Pitch>
struct StepTile {
    const T* first;

    KGEN_DEVICE Words<T, Width> step(int i) const {
        Words<T, Width> words;
        words.load(first + i * Pitch);
        return words;
    }
    KGEN_DEVICE float value(int i, int j) const { return to_float(first[i * Pitch + j]); }
};

// The states before a thread's steps in shared memory, where they take no registers: 2 * Width floats a step.
template <int Width, int Threads>
struct KeptStates {
    static constexpr int kPiece = Width == 1 ? 2 : 4;  // floats of one access
    static constexpr int kPieces = 2 * Width / kPiece;
    static constexpr int kFloats = 2 * Width * Threads;  // of a step

    float* own;  // of the thread

    KGEN_DEVICE explicit KeptStates(float* memory)
        : own(memory + static_cast<int>(threadIdx.x) * kPiece) {}
    KGEN_DEVICE void put(int i, const float (&a)[Width], const float (&b)[Width]) const {
        float values[2 * Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) values[j] = a[j], values[Width + j] = b[j];
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
            Vec<float, kPiece> piece;
#pragma unroll
            for (int j = 0; j < kPiece; ++j) piece[j] = values[n * kPiece + j];
            *at(i, n) = piece;
        }
    }
    KGEN_DEVICE void get(int i, float (&a)[Width], float (&b)[Width]) const {
        float values[2 * Width];
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
            const Vec<float, kPiece> piece = *at(i, n);
#pragma unroll
            for (int j = 0; j < kPiece; ++j) values[n * kPiece + j] = piece[j];
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) a[j] = values[j], b[j] = values[Width + j];
    }
    KGEN_DEVICE Vec<float, kPiece>* at(int i, int n) const {
        return reinterpret_cast<Vec<float, kPiece>*>(own + i * kFloats + n * kPiece * Threads);
    }
};

// A segment of a channel step by step, for keys that have no common anchor: `weighted_step`, in loops that are not
// unrolled, so that what a step needs is in local memory.
template <int Steps>
struct SeparateSteps {
    WeightedStep step[Steps];
    float m;  // exponent after the segment

    template <class Tile>
    KGEN_DEVICE static WholeSum<false> sums(const ChannelExponents& channel, const Tile& k,
                                            const Tile& v, int j, int count) {
        RunningState state{kEmpty, 0.0f, 0.0f};
#pragma unroll 1
        for (int i = 0; i < count; ++i) state.step(channel.decay, k.value(i, j), v.value(i, j));
        return WholeSum<false>::of_natural(state.m, state.a, state.b);
    }

    // The gradient before the segment of its own steps, in units of 2^-(exponent of `before`).
    template <class Tile>
    KGEN_DEVICE StateGradient outputs(const WholeSum<false>& before,
                                      const ChannelExponents& channel, const Tile& k, const Tile& v,
                                      const Tile& gy, int j) {
        RunningState state = RunningState::of(before);
        const float factor = RunningState::lost_factor(before.exponent, state.m);
#pragma unroll 1
        for (int i = 0; i < Steps; ++i)
            step[i] = weighted_step(state, channel, k.value(i, j), v.value(i, j), gy.value(i, j));
        m = state.m;
        StateGradient sum;
#pragma unroll 1
        for (int i = Steps - 1; i >= 0; --i) sum.step_back(step[i]);
        return {factor * sum.a, factor * sum.b};
    }

    // `after`: the gradient after the segment, in units of 2^-exponent. Stores gk and gv of the first `count` steps.
    template <class Tile, class T, int Width>
    KGEN_DEVICE void gradients(float& gw, float& gu, const StateGradient& after, float exponent,
                               const Tile& v, const StepRows<T, Width>& gk,
                               const StepRows<T, Width>& gv, i64 t, int j, int count) const {
        StateGradient gradient = in_units_of(m, after, exponent);
        gw = gu = 0.0f;
#pragma unroll 1
        for (int i = Steps - 1; i >= 0; --i) {
            if (i >= count) continue;
            float found_gk, found_gv;
            gradients_of(found_gk, found_gv, gw, gu, step[i], v.value(i, j), gradient);
            gk.at(t + i)[j] = from_float<T>(found_gk);
            gv.at(t + i)[j] = from_float<T>(found_gv);
            gradient.step_back(step[i]);
        }
    }
};

// A thread's segment of `Width` channels.
template <class T, int Width, int Steps, class Tile, class Kept>
struct AnchoredSegment {
    float weight[Steps][Width];
    float y[Steps][Width], r[Steps][Width];
    float anchor[Width];
    bool apart[Width];

    // Chooses the anchors, and sums the segment from 0.
    KGEN_DEVICE void weigh(WholeSum<false> (&sums)[Width],
                           const AnchoredChannel (&channel)[Width], const Tile& k, const Tile& v) {
        Words<T, Width> keys[Steps];
        KeyRange<T, Width> range;
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            keys[i] = k.step(i);
            range.add(keys[i], i == 0);
        }
        range.finish();
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float top = fma(range.most[j], kLog2e, channel[j].above);
            const float width = top - fma(range.least[j], kLog2e, channel[j].below);
            apart[j] = !(width <= kFar);
            anchor[j] = apart[j] ? 0.0f : nearest_whole(top - larger(width - kNear, 0.0f));
            sums[j] = {anchor[j], 0.0f, 0.0f};
        }
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            float key[Width], value[Width];
            keys[i].to_floats(key);
            v.step(i).to_floats(value);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float own = fast_exp2(fma(key[j], kLog2e, -anchor[j]));
                weight[i][j] = own;
                sums[j].a = fma(channel[j].decay, sums[j].a, own * value[j]);
                sums[j].b = fma(channel[j].decay, sums[j].b, own);
            }
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) sums[j].normalise(sums[j].b);
    }

    // The outputs, from the state before the segment. sums[j] <- the gradient before the segment of its own steps, in
    // units of 2^-(exponent of that state).
    KGEN_DEVICE void outputs(StateGradient (&sums)[Width], const WholeSum<false> (&before)[Width],
                             const AnchoredChannel (&channel)[Width], const Tile& v,
                             const Tile& gy, const Kept& kept) {
        float unit[Width], now_a[Width], now_b[Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float lowest = before[j].exponent - kMostState;
            if (lowest > anchor[j]) {
                apart[j] = apart[j] || !channel[j].lasting;
                const float scale = fast_exp2(anchor[j] - lowest);
#pragma unroll
                for (int i = 0; i < Steps; ++i) weight[i][j] *= scale;
                anchor[j] = lowest;
            }
            unit[j] = fast_exp2(before[j].exponent - anchor[j]);
            now_a[j] = unit[j] * before[j].a;
            now_b[j] = unit[j] * before[j].b;
        }
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            float value[Width], gys[Width];
            v.step(i).to_floats(value);
            gy.step(i).to_floats(gys);
            kept.put(i, now_a, now_b);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float term = weight[i][j] * value[j];
                const float inverse = fast_reciprocal(fma(weight[i][j], channel[j].bonus, now_b[j]));
                y[i][j] = fma(term, channel[j].bonus, now_a[j]) * inverse;
                r[i][j] = gys[j] * inverse;
                now_a[j] = fma(channel[j].decay, now_a[j], term);
                now_b[j] = fma(channel[j].decay, now_b[j], weight[i][j]);
            }
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            StateGradient sum;
#pragma unroll
            for (int i = Steps - 1; i >= 0; --i) step_back(sum, channel[j], i, j);
            sums[j] = {unit[j] * sum.a, unit[j] * sum.b};
        }
    }

    KGEN_DEVICE void step_back(StateGradient& gradient, const AnchoredChannel& channel, int i,
                               int j) const {
        gradient.a = fma(channel.decay, gradient.a, r[i][j]);
        gradient.b = fma(channel.decay, gradient.b, -r[i][j] * y[i][j]);
    }

    // Gradients of the steps, of which the first `count` are stored; gw and gu of the segment. `after` is the gradient
    // after the segment in units of 2^-exponent.
    template <bool Whole>
    KGEN_DEVICE void gradients(float (&gw)[Width], float (&gu)[Width],
                               const StateGradient (&after)[Width], const float (&exponent)[Width],
                               const AnchoredChannel (&channel)[Width], const Tile& v,
                               const Kept& kept, const StepRows<T, Width>& gk,
                               const StepRows<T, Width>& gv, i64 t, int count) const {
        StateGradient gradient[Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float units = fast_exp2(smaller(anchor[j] - exponent[j], 126.0f));
            gradient[j] = {units * after[j].a, units * after[j].b};
            gw[j] = gu[j] = 0.0f;
        }
        T* gk_row = gk.at(t + Steps);
        T* gv_row = gv.at(t + Steps);
#pragma unroll
        for (int i = Steps - 1; i >= 0; --i) {
            gk_row -= gk.stride;
            gv_row -= gv.stride;
            if (!Whole && i >= count) continue;
            float value[Width], a[Width], b[Width], gks[Width], gvs[Width];
            v.step(i).to_floats(value);
            kept.get(i, a, b);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float own = channel[j].bonus * r[i][j];
                const float bonus = own * (value[j] - y[i][j]);
                gks[j] = weight[i][j] * (fma(value[j], gradient[j].a, gradient[j].b) + bonus);
                gvs[j] = weight[i][j] * (gradient[j].a + own);
                gu[j] = fma(weight[i][j], bonus, gu[j]);
                gw[j] = fma(a[j], gradient[j].a, gw[j]);
                gw[j] = fma(b[j], gradient[j].b, gw[j]);
                step_back(gradient[j], channel[j], i, j);
            }
            Words<T, Width>::from_floats(gks).store(gk_row);
            Words<T, Width>::from_floats(gvs).store(gv_row);
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) gw[j] *= channel[j].decay;
    }
};

}  // namespace kgen::wkv4
