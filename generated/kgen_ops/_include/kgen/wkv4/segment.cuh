// The sums and the outputs of a thread's segment of time, with one exponential for each step and channel.
//
// All terms of a segment are weighted relative to one anchor, its largest key, and not to the largest term so far:
//
//     weight_t = 2^(log2e k_t - anchor)                          at most 1
//     N <- e^w N + weight_t v_t,  D <- e^w D + weight_t          the segment's sums, from 0
//
// The outputs come from the same weights, scaled to an anchor that is no less than the exponent of the state before
// the segment and no less than any u + k_t. A step takes three products, four fmas and a reciprocal.
//
// A weight below 2^-126 is 0. The sums are accurate if D is at least kLeast, the outputs if all denominators are.
// `sum` and `outputs_fit` return whether this holds. They also return false for infinite keys, sums with a NaN key, log
// decays above 0 and |u| above 22. The caller then takes the steps one by one (`*_by_steps`). A segment whose keys,
// with u, differ by at most 62 is always computed from its anchor.
//
// With `LargestTerm` a sum has the exponent of its largest term, which a final state needs. Without, the exponent is
// near the logarithm of D, which takes four instructions less for each step.
#pragma once

#include "kgen/wkv4/steps.cuh"

namespace kgen::wkv4 {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLeast = 8.077935669463161e-28f;  // 2^-90
constexpr float kLeastLog2 = -90.0f;
constexpr float kMostBonus = 32.0f;  // the largest |u|, times log2e

// The larger and the smaller of two numbers; of a number and a NaN, the number.
KGEN_DEVICE float larger(float a, float b) {
#if KGEN_HOST
    return __builtin_fmaxf(a, b);
#else
    return ::fmaxf(a, b);
#endif
}
KGEN_DEVICE float smaller(float a, float b) {
#if KGEN_HOST
    return __builtin_fminf(a, b);
#else
    return ::fminf(a, b);
#endif
}

// log2(x) within 0.09, for normal positive x; finite for all others.
KGEN_DEVICE float rough_log2(float x) {
    const float bits = static_cast<float>(static_cast<int>(bit_cast<u32>(x)));
    return fma(bits, 1.1920928955078125e-7f, -127.0f);
}

// A vector of stored values in whole registers. In a Vec of 16-bit values the compiler would handle halves of registers
// one by one.
template <class T, int Width>
struct Words {
    using Stored = Vec<T, Width>;
    static constexpr int kWords = (sizeof(Stored) + 3) / 4;

    Vec<u32, kWords> words;

    KGEN_DEVICE void load(const T* row) {
        if constexpr (sizeof(Stored) >= 4) {
            words = load_vec<kWords>(reinterpret_cast<const u32*>(row));
        } else {
            const Stored value = load_vec<Width>(row);
            words = {};
            copy_bytes<sizeof(Stored)>(&words, &value);
        }
    }
    KGEN_DEVICE void store(T* row) const {
        if constexpr (sizeof(Stored) >= 4)
            store_vec(reinterpret_cast<u32*>(row), words);
        else
            store_vec(row, value());
    }
    KGEN_DEVICE Stored value() const {
        Stored result;
        copy_bytes<sizeof(Stored)>(&result, &words);
        return result;
    }
    KGEN_DEVICE void to_floats(float (&out)[Width]) const {
        if constexpr (sizeof(T) == 2 && Width > 1) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const f32x2 pair = unpack2<T>(words[i]);
                out[2 * i] = pair.x;
                out[2 * i + 1] = pair.y;
            }
        } else {
            kgen::to_floats(value(), out);
        }
    }
    KGEN_DEVICE static Words from_floats(const float (&values)[Width]) {
        Words result;
        if constexpr (sizeof(T) == 2 && Width > 1) {
#pragma unroll
            for (int i = 0; i < kWords; ++i)
                result.words[i] = pack2<T>(values[2 * i], values[2 * i + 1]);
        } else {
            const Stored value = kgen::from_floats<T>(values);
            result.words = {};
            copy_bytes<sizeof(Stored)>(&result.words, &value);
        }
        return result;
    }
};

// `Steps` steps of a tensor in registers.
template <class T, int Width, int Steps>
struct Loaded {
    Words<T, Width> step[Steps];

    // Loads the first `count` steps from `row` on; the others are 0.
    KGEN_DEVICE void load(const T* row, i64 stride_t, int count) {
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            step[i].words = {};
            if (i < count) step[i].load(row + i * stride_t);
        }
    }
};

// The larger and the smaller numbers of two pairs of 16-bit values, one instruction each.
#if !KGEN_HOST && KGEN_ARCH >= 800
constexpr bool kPairExtremes = true;
#define KGEN_DEFINE_EXTREME(name, type, instruction)                     \
    KGEN_DEVICE u32 name(type, u32 a, u32 b) {                           \
        u32 result;                                                      \
        asm(instruction " %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b)); \
        return result;                                                   \
    }
KGEN_DEFINE_EXTREME(larger_pair, bf16, "max.bf16x2")
KGEN_DEFINE_EXTREME(larger_pair, fp16, "max.f16x2")
KGEN_DEFINE_EXTREME(smaller_pair, bf16, "min.bf16x2")
KGEN_DEFINE_EXTREME(smaller_pair, fp16, "min.f16x2")
#undef KGEN_DEFINE_EXTREME
#else
constexpr bool kPairExtremes = false;
#endif

// The largest and the smallest key of each of `Width` channels. NaN is ignored.
template <class T, int Width>
struct KeyRange {
    static constexpr bool kPacked = kPairExtremes && sizeof(T) == 2 && Width > 1;
    static constexpr int kWords = Width > 1 ? Width / 2 : 1;

    float most[Width], least[Width];              // after `finish`
    u32 most_pairs[kWords], least_pairs[kWords];  // if kPacked

    KGEN_DEVICE void add(const Words<T, Width>& keys, bool first) {
        if constexpr (kPacked) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const u32 pair = keys.words[i];
                most_pairs[i] = first ? pair : larger_pair(T{}, most_pairs[i], pair);
                least_pairs[i] = first ? pair : smaller_pair(T{}, least_pairs[i], pair);
            }
        } else {
            float wide[Width];
            keys.to_floats(wide);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                most[j] = first ? wide[j] : larger(most[j], wide[j]);
                least[j] = first ? wide[j] : smaller(least[j], wide[j]);
            }
        }
    }

    // Computes `most` and `least`, after the last add().
    KGEN_DEVICE void finish() {
        if constexpr (kPacked) {
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                const f32x2 high = unpack2<T>(most_pairs[i]), low = unpack2<T>(least_pairs[i]);
                most[2 * i] = high.x, most[2 * i + 1] = high.y;
                least[2 * i] = low.x, least[2 * i + 1] = low.y;
            }
        }
    }
};

// The constants of a channel, which all its segments share.
struct ChannelFactors {
    float decay;         // w
    float factor;        // e^w
    float lasting;       // e^(w (steps - 1)), steps of a whole segment
    float bonus;         // u
    float bonus_log2;    // log2e u
    float bonus_factor;  // e^u
    bool ordinary;       // whether w and u allow anchors

    KGEN_DEVICE void set(float w, float u, int steps) {
        decay = w;
        factor = exp(w);
        lasting = exp(w * static_cast<float>(steps - 1));
        bonus = u;
        bonus_log2 = u * kLog2e;
        bonus_factor = exp(u);
        ordinary = w <= 0.0f && abs(bonus_log2) <= kMostBonus;
    }
};

// A segment of `Steps` steps of one thread. `Whole`: all steps exist; otherwise the first `count` do, and the steps
// after them have weight 0 and decay 1.
template <int Width, int Steps, bool LargestTerm>
struct Segment {
    using P = PairOf<false>;

    float weight[Steps][Width];
    float anchor[Width];  // log2e * the largest key
    float least[Width];   // the smallest key

    // sums <- the segment's sums. Returns whether they are accurate.
    template <bool Whole, class T>
    KGEN_DEVICE bool sum(P (&sums)[Width], const ChannelFactors (&channel)[Width],
                         const Loaded<T, Width, Steps>& k, const Loaded<T, Width, Steps>& v,
                         int count) {
        KeyRange<T, Width> range;
#pragma unroll
        for (int i = 0; i < Steps; ++i)
            if (Whole || i == 0 || i < count) range.add(k.step[i], i == 0);
        range.finish();
        float a[Width] = {}, b[Width] = {}, largest[Width] = {}, exponent[Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            // Rounded by an fma, so that the compiler does not make the product a part of another fma.
            anchor[j] = fma(range.most[j], kLog2e, 0.0f);
            least[j] = range.least[j];
            exponent[j] = -infinity();
        }
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            const bool there = Whole || i < count;
            float keys[Width], values[Width];
            k.step[i].to_floats(keys);
            v.step[i].to_floats(values);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float factor = there ? channel[j].factor : 1.0f;
                const float e = there ? fast_exp2(fma(keys[j], kLog2e, -anchor[j])) : 0.0f;
                weight[i][j] = e;
                a[j] = fma(a[j], factor, e * values[j]);
                b[j] = fma(b[j], factor, e);
                if constexpr (LargestTerm) {
                    largest[j] = larger(largest[j] * factor, e);
                    exponent[j] =
                        there ? larger(exponent[j] + channel[j].decay, keys[j]) : exponent[j];
                }
            }
        }
        bool right = true;
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            right = right && b[j] >= kLeast && channel[j].ordinary;
            if constexpr (LargestTerm) {
                const float scale = fast_reciprocal(largest[j]);
                sums[j] = P{exponent[j], a[j] * scale, b[j] * scale};
            } else {
                exponent[j] = (anchor[j] + rough_log2(b[j])) * kLn2;
                const float scale = fast_exp2(fma(-exponent[j], kLog2e, anchor[j]));
                sums[j] = P{exponent[j], a[j] * scale, b[j] * scale};
            }
        }
        return right;
    }

    // Whether `outputs` is accurate for these states before the segment, provided that `sum` returned true.
    KGEN_DEVICE bool outputs_fit(const P (&states)[Width],
                                 const ChannelFactors (&channel)[Width]) const {
        bool fit = true;
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float common = common_anchor(states[j], channel[j], j);
            const float kept = fast_exp2(fma(states[j].exponent, kLog2e, -common)) * states[j].b;
            const float own = fma(least[j], kLog2e, channel[j].bonus_log2) - common;
            fit = fit && (own >= kLeastLog2 || kept * channel[j].lasting >= kLeast);
        }
        return fit;
    }

    // Stores the outputs of the steps from t on, from the states before them.
    template <bool Whole, class T>
    KGEN_DEVICE void outputs(const P (&states)[Width], const ChannelFactors (&channel)[Width],
                             const Loaded<T, Width, Steps>& v, T* row, i64 stride_t,
                             int count) const {
        float scale[Width], a[Width], b[Width];
#pragma unroll
        for (int j = 0; j < Width; ++j) {
            const float common = common_anchor(states[j], channel[j], j);
            const float before = fast_exp2(fma(states[j].exponent, kLog2e, -common));
            scale[j] = fast_exp2(anchor[j] - common);
            a[j] = before * states[j].a;
            b[j] = before * states[j].b;
        }
#pragma unroll
        for (int i = 0; i < Steps; ++i) {
            if (!Whole && i >= count) break;
            float values[Width], found[Width];
            v.step[i].to_floats(values);
#pragma unroll
            for (int j = 0; j < Width; ++j) {
                const float own = weight[i][j] * scale[j], term = own * values[j];
                const float den = fma(own, channel[j].bonus_factor, b[j]);
                found[j] = fma(term, channel[j].bonus_factor, a[j]) * fast_reciprocal(den);
                a[j] = fma(a[j], channel[j].factor, term);
                b[j] = fma(b[j], channel[j].factor, own);
            }
            Words<T, Width>::from_floats(found).store(row + i * stride_t);
        }
    }

private:
    // Returns an anchor that is no less than log2e times the state's exponent, any k_t and any u + k_t.
    KGEN_DEVICE float common_anchor(const P& state, const ChannelFactors& channel, int j) const {
        return larger(anchor[j] + larger(channel.bonus_log2, 0.0f), state.exponent * kLog2e);
    }
};

// Calls visit(i, keys, values) for each of the `count` steps from t on. Several steps are loaded at a time: each step
// depends on the previous step, and with one load at a time it would wait for memory as well.
template <class T, int Width, class Visit>
KGEN_DEVICE void visit_steps(const Channels<const T, Width>& k, const Channels<const T, Width>& v,
                             i64 t, int count, const Visit& visit) {
    constexpr int kGroup = 4;
#pragma unroll 1
    for (int first = 0; first < count; first += kGroup) {
        Loaded<T, Width, kGroup> k_steps, v_steps;
        k_steps.load(k.at(t + first), k.stride_t, count - first);
        v_steps.load(v.at(t + first), v.stride_t, count - first);
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            if (first + i >= count) break;
            float keys[Width], values[Width];
            k_steps.step[i].to_floats(keys);
            v_steps.step[i].to_floats(values);
            visit(first + i, keys, values);
        }
    }
}

// sums <- the sums of the `count` steps from t on, which are taken one by one: accurate for all values.
template <class T, int Width>
KGEN_DEVICE void sum_by_steps(PairOf<false> (&sums)[Width], const ChannelFactors (&channel)[Width],
                              const Channels<const T, Width>& k, const Channels<const T, Width>& v,
                              i64 t, int count) {
#pragma unroll
    for (int j = 0; j < Width; ++j) sums[j] = {};
    visit_steps(k, v, t, count,
                [&](int, const float(&keys)[Width], const float(&values)[Width]) {
#pragma unroll
                    for (int j = 0; j < Width; ++j)
                        step(sums[j], channel[j].decay, keys[j], values[j]);
                });
}

// As Segment::outputs, one step after the other: accurate for all values.
template <class T, int Width>
KGEN_DEVICE void outputs_by_steps(PairOf<false> (&states)[Width],
                                  const ChannelFactors (&channel)[Width],
                                  const Channels<const T, Width>& k,
                                  const Channels<const T, Width>& v, const Channels<T, Width>& y,
                                  i64 t, int count) {
    visit_steps(k, v, t, count,
                [&](int i, const float(&keys)[Width], const float(&values)[Width]) {
                    float found[Width];
#pragma unroll
                    for (int j = 0; j < Width; ++j) {
                        found[j] = output_of(states[j], channel[j].bonus + keys[j], values[j]).y;
                        step(states[j], channel[j].decay, keys[j], values[j]);
                    }
                    Words<T, Width>::from_floats(found).store(y.at(t + i));
                });
}

}  // namespace kgen::wkv4
