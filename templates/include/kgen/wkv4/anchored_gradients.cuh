// Sums and gradients of a thread's segment of time whose steps have weights relative to one anchor, a whole exponent:
//
//     weight = 2^(log2e k - anchor)      a <- e^w a + weight v      b <- e^w b + weight
//
// States within the segment are in units of 2^anchor, gradients by them in units of 2^-anchor. The decay of a step is
// then a constant of the channel, and a step takes one exponential and one reciprocal:
//
//     y = (a + e^u weight v) / (b + e^u weight)      r = gy / (b + e^u weight)       own = e^u r (v - y)
//     gv = weight (ga + e^u r)                       gk = weight (v ga + gb + own)   gw = sum of a ga + b gb, times e^w
//     ga <- e^w ga + r                               gb <- e^w gb - r y              gu = sum of weight own
//
// Numerators a are stored multiplied by kBias; everything else is in units of 2^anchor or 2^-anchor. Instructions for
// exponentials and reciprocals flush subnormal numbers, and in other instructions subnormal numbers lose their last
// bits. Anchors are therefore chosen such that the numbers stay away from both ends of the range of fp32:
//
//     weights, also times e^u, and b      from 2^kLow to 2^kHigh, unless an anchor moves up
//     gradients                           lose 2^-150, which is 2^(kHigh - 150) of gk and gv
//     y                                   loses 2^-150 / (kBias 2^kLow)
//
// Both losses are below 1024 * 2^-126, which a certificate allows for values near 1. The anchor is the largest exponent
// of the segment's terms, with or without the bonus. Where the exponents differ by more than -kLow, the anchor is
// lower, such that the smallest weight is 2^kLow. Where they differ by more than kFar, or keys are infinite or all NaN,
// the channel is `apart`: its steps are taken one by one (SeparateSteps), with the same sums and states between
// segments. A channel whose numerators or sums of gradients overflow is `apart`, too. The code for anchored channels
// runs for such a channel as well, but its results have no meaning and are not used.
//
// In units of 2^-anchor the gradients by states, also the gradient from later segments, may be up to 2^-kLow times as
// large as gk and gv. Where a result is not finite, the segment of the channel is computed again, step by step; its
// sums and states were finite, and are kept.
//
// A state before the segment whose exponent is above the anchor by more than kMostState moves the anchor up. Weights
// that thereby fall below 2^kLow are too small to count, unless a strong decay or a large bonus makes them count within
// the segment; then the channel is `apart`. A channel is also `apart` if the state's exponent is more than -kLeastState
// below the anchor, or if the anchor would move up by more than kMostShift, which is the most that one exact factor can
// do.
#pragma once

#include "kgen/wkv4/weighted_gradients.cuh"

namespace kgen::wkv4 {

constexpr float kLow = -106.0f;  // log2 of the smallest weight
constexpr float kHigh = 30.0f;   // of the largest weight or state
constexpr float kFar = kHigh - kLow;
constexpr float kBias = 0x1p80f;  // factor of numerators
constexpr float kUnbias = 0x1p-80f;
constexpr float kMostState = 24.0f;  // of the unit of the state before a segment; the state's b is at most 32 units
constexpr float kLeastState = -120.0f;
constexpr float kMostShift = 120.0f;  // by which an anchor moves up
// Limits of a segment whose anchor moves up so far that weights may fall below 2^kLow.
constexpr int kMostDecay = 40;  // log2 of the inverse decay
constexpr float kMostShiftedBonus = 8.0f;
// Limits of the bonus of channels with anchors. Products of weights without the bonus and gradients lose 2^-150; gu is
// their sum times the bonus.
constexpr float kLeastBonusLog2 = -100.0f, kMostBonusLog2 = 30.0f;
// A decay whose log2 is between these limits is subnormal or 0 in fp32, but counts where keys are far apart: all
// segments of such a channel are `apart`.
constexpr float kLeastDecayLog2 = -125.0f;
constexpr float kNoDecayLog2 = -290.0f;
constexpr float kMostNumerator = 0x1p120f;  // larger sums may have overflowed within the segment
constexpr float kMostGradient = 0x1p110f;

// The constants of a channel, which all its segments share.
struct AnchoredChannel {
    float decay;       // e^w
    float bonus;       // e^u
    float bonus_log2;  // log2e u; infinity if all segments are apart

    KGEN_DEVICE void set(float w, float u) {
        const WholeDecay step = WholeDecay::of(w, 1);
        decay = step.factor * exp2(step.whole);
        bonus = exp(u);
        bonus_log2 = u * kLog2e;
        const float decay_log2 = step.natural * kLog2e;
        const bool lost = decay_log2 < kLeastDecayLog2 && decay_log2 > kNoDecayLog2;
        if (lost || bonus_log2 > kMostBonusLog2 || bonus_log2 < kLeastBonusLog2)
            bonus_log2 = infinity();
    }
};

// Rows of a thread's channels in global memory, beginning with `row`. The stride is in bytes, so that an address takes
// one instruction.
template <class T>
struct ByteRows {
    T* row;
    u32 stride;

    KGEN_DEVICE ByteRows(T* first, i64 t, i64 stride_t)
        : row(first + t * stride_t), stride(static_cast<u32>(stride_t) * u32{sizeof(T)}) {}
    KGEN_DEVICE T* at(int i) const {
        return reinterpret_cast<T*>(bytes() + static_cast<u64>(stride) * static_cast<u32>(i));
    }
    KGEN_DEVICE void move(int steps) {
        row = reinterpret_cast<T*>(bytes() + static_cast<i64>(stride) * steps);
    }
    KGEN_DEVICE u8* bytes() const { return const_cast<u8*>(reinterpret_cast<const u8*>(row)); }
};

// Steps of a tensor that a block has staged in shared memory, in rows of `Pitch` elements, at a thread's channels.
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

// Four floats for each column and each segment of a round, in shared memory: (exponent, a, b, -) of a state, or (a, b,
// change of the exponent, -) of a gradient. Channel j of lane l has column j * lanes + l.
template <int Columns>
struct QuadSlots {
    static constexpr int kFloats = 4 * Columns;  // of a slot

    float* memory;

    KGEN_DEVICE float* at(int slot, int column) const {
        return memory + slot * kFloats + 4 * column;
    }
    KGEN_DEVICE void put(int slot, int column, float x, float y, float z) const {
        *reinterpret_cast<Vec<float, 4>*>(at(slot, column)) = {x, y, z, 0.0f};
    }
    KGEN_DEVICE void put(int slot, int column, const WholeSum<false>& sum) const {
        put(slot, column, sum.exponent, sum.a, sum.b);
    }
    KGEN_DEVICE WholeSum<false> sum(int slot, int column) const {
        const auto found = *reinterpret_cast<const Vec<float, 4>*>(at(slot, column));
        return {found[0], found[1], found[2]};
    }
    KGEN_DEVICE float exponent(int slot, int column) const { return at(slot, column)[0]; }
    KGEN_DEVICE void put(int slot, int column, const StateGradient& gradient, float change) const {
        put(slot, column, gradient.a, gradient.b, change);
    }
    KGEN_DEVICE void put_gradient(int slot, int column, const StateGradient& gradient) const {
        *reinterpret_cast<Vec<float, 2>*>(at(slot, column)) = {gradient.a, gradient.b};
    }
    KGEN_DEVICE StateGradient gradient(int slot, int column) const {
        const auto found = *reinterpret_cast<const Vec<float, 2>*>(at(slot, column));
        return {found[0], found[1]};
    }

    // Replaces the sums of `Segments` segments from `slot` on by the states before them. `state`, before the first
    // segment, becomes the state after the last one. Without `Put` the slots are left unchanged.
    template <int Segments, bool Put>
    KGEN_DEVICE void go_on(WholeSum<false>& state, const WholeDecay& decay, int slot,
                           int column) const {
#pragma unroll
        for (int i = 0; i < Segments; ++i) {
            const WholeSum<false> next = sum(slot + i, column);
            if constexpr (Put) put(slot + i, column, state);
            state.append(decay, next);
        }
    }
    // Replaces the sums of `Segments` segments by the gradients after them, as GradientSlots::go_back does for one.
    template <int Segments>
    KGEN_DEVICE void go_back(StateGradient& after, const WholeDecay& decay, int column) const {
#pragma unroll
        for (int i = Segments - 1; i >= 0; --i) {
            const auto own = *reinterpret_cast<const Vec<float, 4>*>(at(i, column));
            put_gradient(i, column, after);
            after.prepend(decay, own[2], {own[0], own[1]});
        }
    }
};

// The states before a thread's steps, stored in shared memory to save registers: 2 * Width floats per step. Without
// `Keep` nothing is stored.
template <int Width, int Threads, bool Keep>
struct KeptStates {
    static constexpr int kPiece = Width == 1 ? 2 : 4;  // floats of one access
    static constexpr int kPieces = 2 * Width / kPiece;
    static constexpr int kFloats = 2 * Width * Threads;  // of a step

    float* own;  // of the thread

    KGEN_DEVICE explicit KeptStates(float* memory)
        : own(memory + static_cast<int>(threadIdx.x) * kPiece) {}
    KGEN_DEVICE void put(int i, const float (&a)[Width], const float (&b)[Width]) const {
        if (!Keep) return;
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

// Computes a segment of a channel step by step (`weighted_step`), for keys that have no common anchor. The loops are
// not unrolled, so that the values of the steps are in local memory.
template <int Steps>
struct SeparateSteps {
    WeightedStep step[Steps];
    float m;  // exponent after the segment

    template <class Tile>
    KGEN_DEVICE static WholeSum<false> sums(float log_decay, const Tile& k, const Tile& v, int j,
                                            int count) {
        RunningState state{kEmpty, 0.0f, 0.0f};
#pragma unroll 1
        for (int i = 0; i < count; ++i) state.step(log_decay, k.value(i, j), v.value(i, j));
        return WholeSum<false>::of_natural(state.m, state.a, state.b);
    }

    // Returns the gradient before the segment, of the segment's own steps only, in units of 2^-(exponent of `before`).
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
    template <class Tile, class T>
    KGEN_DEVICE void gradients(float& gw, float& gu, const StateGradient& after, float exponent,
                               const Tile& v, const ByteRows<T>& gk, const ByteRows<T>& gv, int j,
                               int count) const {
        StateGradient gradient = in_units_of(m, after, exponent);
        gw = gu = 0.0f;
#pragma unroll 1
        for (int i = Steps - 1; i >= 0; --i) {
            if (i >= count) continue;
            float found_gk, found_gv;
            gradients_of(found_gk, found_gv, gw, gu, step[i], v.value(i, j), gradient);
            gk.at(i)[j] = from_float<T>(found_gk);
            gv.at(i)[j] = from_float<T>(found_gv);
            gradient.step_back(step[i]);
        }
    }
};

// A thread's segment of `Width` channels.
template <class T, int Width, int Steps, class Tile>
struct AnchoredSegment {
    float weight[Steps][Width], term[Steps][Width];  // term: weight v kBias
    float r[Steps][Width], ry[Steps][Width];
    float anchor[Width], low[Width];  // low: log2 of the smallest weight
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
            const float bonus = channel[j].bonus_log2;
            const float top = fma(range.most[j], kLog2e, larger(bonus, 0.0f));
            const float width = fma(range.most[j] - range.least[j], kLog2e, abs(bonus));
            apart[j] = !(width <= kFar);
            low[j] = larger(-width, kLow);
            anchor[j] = apart[j] ? 0.0f : nearest_whole(top - width - low[j]);
        }
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            float key[Width], value[Width];
            keys[i].to_floats(key);
            v.step(i).to_floats(value);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                weight[i][j] = fast_exp2(fma(key[j], kLog2e, -anchor[j]));
                term[i][j] = weight[i][j] * (value[j] * kBias);
                sums[j].a = i == 0 ? term[i][j] : fma(channel[j].decay, sums[j].a, term[i][j]);
                sums[j].b = i == 0 ? weight[i][j] : fma(channel[j].decay, sums[j].b, weight[i][j]);
            }
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            sums[j].exponent = anchor[j];
            apart[j] = apart[j] || !(abs(sums[j].a) < kMostNumerator);
            sums[j].normalise(sums[j].b);
            sums[j].a *= kUnbias;
        }
    }

    // Computes the outputs from the state before the segment. sums[j] <- the gradient before the segment, of the
    // segment's own steps only, in units of 2^-(exponent of that state).
    template <class Kept>
    KGEN_DEVICE void outputs(StateGradient (&sums)[Width], const WholeSum<false> (&before)[Width],
                             const AnchoredChannel (&channel)[Width], const Tile& gy,
                             const Kept& kept) {
        constexpr float kLeastDecay =
            1.0f / static_cast<float>(u64{1} << (kMostDecay / Steps));  // of a step
        float unit[Width], a[Width], b[Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float lowest = before[j].exponent - kMostState;
            if (lowest > anchor[j]) {
                const float shift = anchor[j] - lowest;
                const bool counts =
                    channel[j].decay < kLeastDecay || channel[j].bonus_log2 > kMostShiftedBonus;
                apart[j] = apart[j] || shift < -kMostShift || (low[j] + shift < kLow && counts);
                const float scale = fast_exp2(shift);
#pragma unroll
                for (int i = 0; i < Steps; ++i) {
                    weight[i][j] *= scale;
                    term[i][j] *= scale;
                }
                anchor[j] = lowest;
            }
            const float behind = before[j].exponent - anchor[j];
            apart[j] = apart[j] || (behind < kLeastState && before[j].exponent > 0.5f * kEmpty);
            unit[j] = fast_exp2(behind);
            a[j] = unit[j] * (before[j].a * kBias);
            b[j] = unit[j] * before[j].b;
        }
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            float gys[Width];
            gy.step(i).to_floats(gys);
            kept.put(i, a, b);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float inverse = fast_reciprocal(fma(weight[i][j], channel[j].bonus, b[j]));
                const float y = fma(term[i][j], channel[j].bonus, a[j]) * inverse * kUnbias;
                r[i][j] = gys[j] * inverse;
                ry[i][j] = r[i][j] * y;
                a[j] = fma(channel[j].decay, a[j], term[i][j]);
                b[j] = fma(channel[j].decay, b[j], weight[i][j]);
            }
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            StateGradient sum{r[Steps - 1][j], -ry[Steps - 1][j]};
#pragma unroll
            for (int i = Steps - 2; i >= 0; --i) step_back(sum, channel[j], i, j);
            // untested: NaN is on the same side as sums that are too large
            apart[j] = apart[j] || !(abs(sum.a) < kMostGradient && abs(sum.b) < kMostGradient);
            sums[j] = {unit[j] * sum.a, unit[j] * sum.b};
        }
    }

    KGEN_DEVICE void step_back(StateGradient& gradient, const AnchoredChannel& channel, int i,
                               int j) const {
        gradient.a = fma(channel.decay, gradient.a, r[i][j]);
        gradient.b = fma(channel.decay, gradient.b, -ry[i][j]);
    }

    // Stores the gradients of the first `count` steps, and computes gw and gu of the segment. `after(j)` reads the
    // gradient after the segment in units of 2^-exponent. finite[j]: whether gw, gu and the sum of the products gk gv
    // are finite. This sum detects a gk or gv that is not finite, at one instruction per step.
    template <bool Whole, class After, class Kept>
    KGEN_DEVICE void gradients(float (&gw)[Width], float (&gu)[Width], bool (&finite)[Width],
                               const After& after, const float (&exponent)[Width],
                               const AnchoredChannel (&channel)[Width], const Tile& v,
                               const Kept& kept, const ByteRows<T>& gk, const ByteRows<T>& gv,
                               int count) const {
        StateGradient gradient[Width];
        float biased_gw[Width];  // times kBias
        float products[Width];  // sum of gk gv
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            gradient[j] = in_own_units(after(j), exponent[j], j);
            gw[j] = biased_gw[j] = gu[j] = products[j] = 0.0f;
        }
#pragma unroll
        for (int i = Steps - 1; i >= 0; --i) {
            if (!Whole && i >= count) continue;
            float value[Width], a[Width], b[Width], gks[Width], gvs[Width];
            v.step(i).to_floats(value);
            kept.get(i, a, b);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float bonus = channel[j].bonus, own = fma(r[i][j], value[j], -ry[i][j]);
                const float later = fma(value[j], gradient[j].a, gradient[j].b);
                gks[j] = weight[i][j] * fma(bonus, own, later);
                gvs[j] = weight[i][j] * fma(bonus, r[i][j], gradient[j].a);
                products[j] = fma(gks[j], gvs[j], products[j]);
                gu[j] = fma(weight[i][j], own, gu[j]);
                biased_gw[j] = fma(a[j], gradient[j].a, biased_gw[j]);
                gw[j] = fma(b[j], gradient[j].b, gw[j]);
                step_back(gradient[j], channel[j], i, j);
            }
            Words<T, Width>::from_floats(gks).store(gk.at(i));
            Words<T, Width>::from_floats(gvs).store(gv.at(i));
        }
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            gw[j] = channel[j].decay * fma(biased_gw[j], kUnbias, gw[j]);
            gu[j] *= channel[j].bonus;
            // untested: NaN is on the same side as Inf
            finite[j] = abs(fma(gw[j], gu[j], products[j])) < infinity();
        }
    }

    // The state before the segment, of a channel that is not `apart`.
    template <class Kept>
    KGEN_DEVICE WholeSum<false> before(const Kept& kept, int j) const {
        float a[Width], b[Width];
        kept.get(0, a, b);
        WholeSum<false> state{b[j] > 0.0f ? anchor[j] : kEmpty, a[j], b[j]};
        state.normalise(b[j]);
        state.a *= kUnbias;
        return state;
    }

    // The gradient after the segment in units of 2^-anchor.
    KGEN_DEVICE StateGradient in_own_units(const StateGradient& after, float exponent,
                                           int j) const {
        const float units = fast_exp2(smaller(anchor[j] - exponent, 126.0f));
        return {units * after.a, units * after.b};
    }
};

}  // namespace kgen::wkv4
