// Sums and outputs of a thread's segment of time, with the same instructions for all values.
//
// A state within a segment is (m, a, b): numerator a e^m, denominator b e^m. m is the running maximum of its terms'
// exponents, m <- max(m + w, k_t), so that one of the two weights of a step is 1 and b does not vanish. A step takes
// one exponential, e^-|k_t - m - w|, and four multiply-adds under a predicate, of which two take effect.
//
// The sums of a segment need no running maximum: their weights are relative to the segment's end, where the largest
// term has a weight near 1, and a weight that underflows is too small to count. Such a sum is (a, b) 2^exponent with a
// whole exponent, and the decay of several steps is a whole exponent and a factor near 1. Whole exponents add without
// rounding, so that the sums of any number of segments have no more than the error of their factors.
//
// NaN reaches a and b, never an exponent. A decay of 0 is w = -Inf.
#pragma once

#include "kgen/wkv4/segment.cuh"

namespace kgen::wkv4 {

constexpr float kLog2eLow = 1.9259629911e-8f;  // log2e - kLog2e
constexpr float kMostRatio = 60.0f;  // log2 of the largest weight of a step's own term, relative to its state

// The nearest whole number.
KGEN_DEVICE float nearest_whole(float x) {
#if KGEN_HOST
    return __builtin_rintf(x);
#else
    return ::rintf(x);
#endif
}

// The smaller of two numbers; NaN if x is NaN.
KGEN_DEVICE float smaller_or_nan(float x, float bound) {
#if !KGEN_HOST && KGEN_ARCH >= 800
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(bound));
    return result;
#else
    return x > bound ? bound : x;
#endif
}

// Adds (x, y) e^shift to (a, b) and makes (a, b) relative to the larger of the two exponents; `small` is e^-|shift|.
KGEN_DEVICE void add_shifted(float& a, float& b, float x, float y, float shift, float small) {
#if KGEN_HOST
    const bool rises = shift > 0.0f;
    a = rises ? fma(small, a, x) : fma(small, x, a);
    b = rises ? fma(small, b, y) : fma(small, y, b);
#else
    asm("{ .reg .pred rises; setp.gt.f32 rises, %4, 0f00000000;\n"
        "@rises fma.rn.f32 %0, %5, %0, %2;\n"
        "@rises fma.rn.f32 %1, %5, %1, %3;\n"
        "@!rises fma.rn.f32 %0, %5, %2, %0;\n"
        "@!rises fma.rn.f32 %1, %5, %3, %1; }"
        : "+f"(a), "+f"(b)
        : "f"(x), "f"(y), "f"(shift), "f"(small));
#endif
}

// The decay of several steps: factor * 2^whole = e^(log decay * steps).
struct WholeDecay {
    float whole = 0.0f, factor = 1.0f;
    float natural = 0.0f;  // log decay * steps

    KGEN_DEVICE static WholeDecay of(float log_decay, i64 steps) {
        if (steps == 0) return {};  // untested: a single segment has steps
        const float count = static_cast<float>(steps);
        const float natural = log_decay * count;
        const float exponent = natural * kLog2e;
        const float whole = nearest_whole(exponent);
        // The rounding errors of the products. Exponents beyond 2^24 have no fraction.
        const float lost = fma(natural, kLog2e, -exponent) +
                           fma(natural, kLog2eLow, fma(log_decay, count, -natural) * kLog2e);
        const float rest = (exponent - whole) + lost;
        return {whole, abs(exponent) < 1e7f ? exp2(rest) : 1.0f, natural};
    }
};

// (a, b) 2^exponent, where the exponent is a whole number. With `Largest` the sum also has its largest term, which a
// state in memory needs: the term is most * 2^exponent, and its exponent to base e is `largest`.
template <bool Largest>
struct WholeSum {
    static constexpr int kFloats = Largest ? 5 : 3;  // in memory

    float exponent = kEmpty, a = 0.0f, b = 0.0f;
    float largest = kEmpty, most = 0.0f;

    // Scales the sums by the power of two that brings `size`, which is of the order of a or b, to between 1 and 2. Does
    // nothing if `size` is 0; with `Largest` also if it is not finite.
    KGEN_DEVICE void normalise(float size) {
        u32 bits = bit_cast<u32>(size) & 0x7f800000u;
        // A denominator that is NaN or Inf must not make the numerator of a returned state vanish.
        if constexpr (Largest) bits = bits == 0x7f800000u ? 0 : bits;
        bits = min(bits, 0x7e800000u);
        // untested: the sum of a segment with steps, or with an initial state, is not 0
        bits = bits == 0 ? 0x3f800000u : bits;
        const float scale = bit_cast<float>(0x7f000000u - bits);
        exponent += static_cast<float>(static_cast<int>(bits >> 23) - 127);
        a *= scale;
        b *= scale;
        if constexpr (Largest) most *= scale;
    }

    // Decays the sums, then adds the sums of later steps.
    KGEN_DEVICE void append(const WholeDecay& decay, const WholeSum& later) {
        const float kept = exponent + decay.whole;
        exponent = larger(kept, later.exponent);
        const float old = fast_exp2(kept - exponent) * decay.factor;
        const float now = fast_exp2(later.exponent - exponent);
        a = fma(old, a, now * later.a);
        b = fma(old, b, now * later.b);
        if constexpr (Largest) {
            largest = larger(largest + decay.natural, later.largest);
            most = larger(old * most, now * later.most);
        }
    }

    // Reads a state in memory, (num, den, max) with max to base e. Returns an empty sum if `states` is null.
    KGEN_DEVICE static WholeSum of_state(const float* states, i64 column) {
        if (states == nullptr) return {};
        return of_natural(states[column * 3 + 2], states[column * 3], states[column * 3 + 1]);
    }

    // Writes element `column` of [B * C, 3], in the unit of the largest term.
    KGEN_DEVICE void store_state(float* states, i64 column) const {
        // untested: 0 only without steps and without an initial state
        const float factor = most > 0.0f ? 1.0f / most : 1.0f;
        states[column * 3] = factor * a;
        states[column * 3 + 1] = factor * b;
        states[column * 3 + 2] = largest;
    }

    // a e^natural and b e^natural.
    KGEN_DEVICE static WholeSum of_natural(float natural, float a, float b) {
        WholeSum sum;
        const float in_base_2 = natural * kLog2e;
        const float whole = nearest_whole(in_base_2);
        const float lost = fma(natural, kLog2e, -in_base_2) + natural * kLog2eLow;
        // untested: no input set has such exponents, of which fp32 holds no fraction
        const float factor = abs(in_base_2) < 1e7f ? exp2((in_base_2 - whole) + lost) : 1.0f;
        sum.exponent = whole;
        sum.a = a * factor;
        sum.b = b * factor;
        sum.largest = natural;
        sum.most = factor;
        sum.normalise(sum.b);
        return sum;
    }
};

// Sums of a block's segments in shared memory: float [slots][kFloats][columns]. A channel j of lane l has the column
// j * Lanes + l, so that neighbouring lanes use neighbouring banks.
template <int Columns, bool Largest>
struct WholeSlots {
    using S = WholeSum<Largest>;
    static constexpr int kFloats = S::kFloats * Columns;  // of a slot

    float* memory;

    KGEN_DEVICE void put(int slot, int column, const S& sum) const {
        float* at = memory + slot * kFloats + column;
        at[0] = sum.exponent;
        at[Columns] = sum.a;
        at[2 * Columns] = sum.b;
        if constexpr (Largest) {
            at[3 * Columns] = sum.largest;
            at[4 * Columns] = sum.most;
        }
    }
    KGEN_DEVICE S get(int slot, int column) const {
        const float* at = memory + slot * kFloats + column;
        S sum{at[0], at[Columns], at[2 * Columns]};
        if constexpr (Largest) {
            sum.largest = at[3 * Columns];
            sum.most = at[4 * Columns];
        }
        return sum;
    }
};

// Sums in memory: float [rows][kFloats][C].
template <bool Largest = false>
struct WholeRows {
    using S = WholeSum<Largest>;

    float* memory;
    i64 C;

    KGEN_DEVICE void put(i64 row, i64 c, const S& sum) const {
        float* at = memory + row * S::kFloats * C + c;
        at[0] = sum.exponent;
        at[C] = sum.a;
        at[2 * C] = sum.b;
        if constexpr (Largest) {
            at[3 * C] = sum.largest;
            at[4 * C] = sum.most;
        }
    }
    KGEN_DEVICE S get(i64 row, i64 c) const {
        const float* at = memory + row * S::kFloats * C + c;
        S sum{at[0], at[C], at[2 * C]};
        if constexpr (Largest) {
            sum.largest = at[3 * C];
            sum.most = at[4 * C];
        }
        return sum;
    }
    KGEN_DEVICE float exponent(i64 row, i64 c) const { return memory[row * S::kFloats * C + c]; }
};

// Steps of a tensor for one thread: `Width` channels a step. The stride has 32 bits, so that the address of a step is
// one instruction.
template <class T, int Width>
struct StepRows {
    T* first;
    u32 stride;  // elements between steps

    KGEN_DEVICE StepRows(T* first, i64 stride_t)
        : first(first), stride(static_cast<u32>(stride_t)) {}
    KGEN_DEVICE T* at(i64 t) const { return first + t * static_cast<i64>(stride); }
    // `i` steps after `row`.
    KGEN_DEVICE T* behind(T* row, int i) const {
        return row + static_cast<u64>(stride) * static_cast<u32>(i);
    }
};

// Loads the first `count` steps from `row` on; the others are 0.
template <bool Whole, class T, int Width, int Steps>
KGEN_DEVICE void load_steps(Loaded<T, Width, Steps>& steps, const StepRows<const T, Width>& rows,
                            const T* row, int count) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (Whole || i < count)
            steps.step[i].load(rows.behind(row, i));
        else
            steps.step[i].words = {};
    }
}
template <class T, int Width, int Steps>
KGEN_DEVICE void load_steps(Loaded<T, Width, Steps>& steps, const StepRows<const T, Width>& rows,
                            const T* row, int count) {
    if (count == Steps)
        load_steps<true>(steps, rows, row, count);
    else
        load_steps<false>(steps, rows, row, count);
}

// The constants of a channel, which all its steps share.
struct ChannelExponents {
    float decay;       // the log decay
    float decay_log2;  // log2e times that
    float bonus_log2;  // log2e u

    KGEN_DEVICE void set(float w, float u) {
        decay = w;
        decay_log2 = w * kLog2e;
        bonus_log2 = u * kLog2e;
    }
};

// The keys of a segment.
template <class T, int Width, int Steps>
KGEN_DEVICE void to_keys(float (&keys)[Steps][Width], const Loaded<T, Width, Steps>& k) {
#pragma unroll
    for (int i = 0; i < Steps; ++i) k.step[i].to_floats(keys[i]);
}

// sums[j] <- the sums of a segment, from 0. `Whole`: all steps exist; otherwise the first `count` do.
template <bool Whole, bool Largest, class T, int Width, int Steps>
KGEN_DEVICE void sum_segment(WholeSum<Largest> (&sums)[Width],
                             const ChannelExponents (&channel)[Width],
                             const float (&keys)[Steps][Width], const Loaded<T, Width, Steps>& v,
                             int count) {
    const int steps = Whole ? Steps : count;
    // The exponent at the segment's end, to base e. The last step has no decay: 0 * -Inf is NaN.
    const auto decayed = [&](int i, float decay, float exponent) {
        const int later = steps - 1 - i;
        return later == 0 ? exponent : fma(decay, static_cast<float>(later), exponent);
    };
    const auto exponent_of = [&](int i, int j) {
        return decayed(i, channel[j].decay, keys[i][j]);
    };
    float top[Width];
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j] = {}, top[j] = kEmpty;
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (!Whole && i >= count) break;
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            top[j] = larger(top[j], exponent_of(i, j));
            if constexpr (Largest)
                sums[j].largest = larger(sums[j].largest + channel[j].decay, keys[i][j]);
        }
    }
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j].exponent = nearest_whole(top[j] * kLog2e);
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (!Whole && i >= count) break;
        float values[Width];
        v.step[i].to_floats(values);
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            float weight;
            if constexpr (Largest) {
                // A state in memory is verified more closely than outputs: large exponents are not rounded here.
                const float rest = fma(keys[i][j], kLog2e, -sums[j].exponent);
                weight = fast_exp2(decayed(i, channel[j].decay_log2, rest));
                sums[j].most = larger(sums[j].most, weight);
            } else {
                weight = fast_exp2(fma(exponent_of(i, j), kLog2e, -sums[j].exponent));
            }
            sums[j].a = fma(weight, values[j], sums[j].a);
            sums[j].b += weight;
        }
    }
}

// A state within a segment.
struct RunningState {
    float m, a, b;

    // m is the sum's exponent converted to base e, rounded; a and b are multiplied by the factor that the rounding
    // lost.
    template <bool Largest>
    KGEN_DEVICE static RunningState of(const WholeSum<Largest>& sum) {
        const float m = sum.exponent * kLn2;
        const float factor = lost_factor(sum.exponent, m);
        return {m, factor * sum.a, factor * sum.b};
    }
    // Returns 2^exponent / e^m, where m is the exponent converted to base e, rounded.
    KGEN_DEVICE static float lost_factor(float exponent, float m) {
        const float lost = fma(-m, kLog2e, exponent) - m * kLog2eLow;
        return fast_exp2(larger(smaller(lost, 1.0f), -1.0f));  // also of an empty sum
    }
    // Advances past a step.
    KGEN_DEVICE void step(float decay, float k, float v) {
        const float kept = m + decay;
        const float shift = k - kept;
        add_shifted(a, b, v, 1.0f, shift, fast_exp2(-abs(shift * kLog2e)));
        m = larger(kept, k);
    }
    // The output of a step, from the state before it. Where the step's own term is 2^kMostRatio times as large as the
    // state, or there is no state, the state does not count.
    KGEN_DEVICE float output(float k, float bonus_log2, float v) const {
        const float ratio = fma(k - m, kLog2e, bonus_log2);
        const float weight = fast_exp2(smaller_or_nan(ratio, kMostRatio));
        return fma(weight, v, a) * fast_reciprocal(b + weight);
    }
};

// Stores the outputs of a segment from step t on, from the states before it. Advances the states past it.
template <bool Whole, class T, int Width, int Steps>
KGEN_DEVICE void segment_outputs(RunningState (&state)[Width],
                                 const ChannelExponents (&channel)[Width],
                                 const float (&keys)[Steps][Width],
                                 const Loaded<T, Width, Steps>& v, const StepRows<T, Width>& rows,
                                 i64 t, int count) {
    T* row = rows.at(t);
#pragma unroll
    for (int i = 0; i < Steps; ++i) {
        if (!Whole && i >= count) break;
        float values[Width], found[Width];
        v.step[i].to_floats(values);
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            found[j] = state[j].output(keys[i][j], channel[j].bonus_log2, values[j]);
            state[j].step(channel[j].decay, keys[i][j], values[j]);
        }
        Words<T, Width>::from_floats(found).store(rows.behind(row, i));
    }
}

}  // namespace kgen::wkv4
