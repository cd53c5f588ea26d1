// What a kernel's w says of a step's decay d, and what a gradient by d is worth as one by w.
#pragma once

#include "math.cuh"

namespace kgen {

//             d               dd/dw                     w that forgets all, that keeps all
//     log     exp(w)          exp(w)                    -inf   0
//     raw     exp(-exp(w))    -exp(w) * exp(-exp(w))    +inf   -inf
//     decay   w               1                         0      1
enum class DecayForm { log, raw, decay };

// A w whose decay is 1.
template <DecayForm Form>
KGEN_DEVICE float w_that_keeps() {
    return Form == DecayForm::raw ? -infinity() : Form == DecayForm::decay ? 1.0f : 0.0f;
}

// d of a w, within 2 ulp, raw's exponent within 2 ulp. Precise: else by the special function unit.
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

// dd/dw of a w whose d is known. Where raw's d is 0 so is this, also if exp(w) is infinite.
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

// The product of several steps' decays: from their logarithms where w has them, else the product
// itself, for which a logarithm would have to be taken.
template <DecayForm Form, bool Precise>
class DecayProduct {
    static constexpr bool kLogs = Form != DecayForm::decay;

public:
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
    KGEN_DEVICE float value() const { return kLogs ? exp(value_) : value_; }

    // Whether the product is within e^-limit and e^limit.
    KGEN_DEVICE bool is_mild(float limit) const {
        if constexpr (kLogs) return abs(value_) <= limit;
        return abs(value_) >= exp(-limit) && abs(value_) <= exp(limit);
    }

private:
    float value_ = kLogs ? 0.0f : 1.0f;
};

}  // namespace kgen
