// Forms of the decay input w: the decay d of a step, and dd/dw, which turns a gradient with respect to d into one with
// respect to w.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

//             d               dd/dw                     w of d = 0, of d = 1
//     log     exp(w)          exp(w)                    -inf   0
//     raw     exp(-exp(w))    -exp(w) * exp(-exp(w))    +inf   -inf
//     decay   w               1                         0      1
enum class DecayForm { log, raw, decay };

// A w whose decay is 1.
template <DecayForm Form>
KGEN_DEVICE float w_of_no_decay() {
    return Form == DecayForm::raw ? -infinity() : Form == DecayForm::decay ? 1.0f : 0.0f;
}

// d of w, within 2 ulp; the argument of raw's exponential is within 2 ulp as well. Without Precise: by the special
// function unit.
template <DecayForm Form, bool Precise = true>
KGEN_DEVICE float decay_of(float w) {
    if constexpr (Form == DecayForm::decay) {
        return w;
    } else if constexpr (Form == DecayForm::raw) {
        return Precise ? exp(-exp(w)) : fast_exp(-fast_exp(w));
    } else {
        return Precise ? exp(w) : fast_exp(w);
    }
}

// dd/dw, from w and its d. Where raw's d is 0, dd/dw is 0 too, even if exp(w) is infinite.
template <DecayForm Form>
KGEN_DEVICE float decay_slope(float w, float d) {
    if constexpr (Form == DecayForm::decay) {
        return 1.0f;
    } else if constexpr (Form == DecayForm::raw) {
        return d == 0.0f ? 0.0f : -exp(w) * d;
    } else {
        return d;
    }
}

// The type of a product of decays, fp64 if Wide.
template <bool Wide>
struct DecayNumber {
    using Type = float;
};
template <>
struct DecayNumber<true> {
    using Type = double;
};

// The product of several steps' decays: from their logarithms where w gives them; otherwise the product itself, because
// a logarithm would have to be computed. Such a product is in fp64 if Precise: where all steps have one decay, the
// error of a chunk's product is the same in each chunk, and a state of thousands of steps adds these errors up.
// Wide: the sum of logarithms is in fp64 too. In fp32, a sum of 16 steps that is near -10 has an error of some 2^-20,
// and so has the product. Inputs in fp32 allow less.
template <DecayForm Form, bool Precise, bool Wide = false>
class DecayProduct {
    static constexpr bool kLogs = Form != DecayForm::decay;
    using Number = typename DecayNumber<kLogs ? Wide : Precise>::Type;

public:
    // The sum of logarithms where w gives them, else the product; lanes exchange it.
    using Exponent = typename DecayNumber<kLogs && Wide>::Type;

    KGEN_DEVICE void times(float w) {
        if constexpr (Form == DecayForm::log) {
            value_ += w;
        } else if constexpr (Form == DecayForm::raw) {
            value_ -= Precise ? exp(w) : fast_exp(w);
        } else {
            value_ *= w;
        }
    }
    KGEN_DEVICE void times(const DecayProduct& other) {
        if constexpr (kLogs) {
            value_ += other.value_;
        } else {
            value_ *= other.value_;
        }
    }
    KGEN_DEVICE float value() const { return value_of(exponent()); }

    KGEN_DEVICE Exponent exponent() const { return static_cast<Exponent>(value_); }
    static KGEN_DEVICE float value_of(Exponent exponent) {
        if constexpr (!kLogs) {
            return exponent;
        } else if constexpr (Wide) {
            const float near = static_cast<float>(exponent), power = exp(near);
            const float rest = static_cast<float>(exponent - static_cast<double>(near));
            return abs(near) < 80.0f ? fma(power, rest, power) : power;  // beyond, `rest` may be infinite or NaN
        } else {
            return exp(exponent);
        }
    }

    // The product of the lane whose number differs from this one's by `mask` (exclusive or).
    KGEN_DEVICE DecayProduct of_lane_xor(int mask) const {
        DecayProduct other;
        other.value_ = shfl_xor(value_, mask);
        return other;
    }

    // The product as accurate as decay_of.
    KGEN_DEVICE float near_value() const {
        if constexpr (kLogs && !Precise) {
            return fast_exp(static_cast<float>(value_));
        } else {
            return value();
        }
    }

private:
    Number value_ = kLogs ? 0 : 1;
};

}  // namespace kgen
