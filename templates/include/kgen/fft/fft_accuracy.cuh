// Which outputs of a convolution by Fourier transforms are accurate, and the scales of its rows.
//
// The error of a transform is relative to the norm of its row, and is about the same at all outputs. An output whose
// own terms are small may not be accurate enough. With u = 2^-23, rows a and b with spectra A and B of N points, and
// the vector y of all 2 N outputs:
//
//     error <= kFftErrors * u * (norm(a) * norm(b) / sqrt(N)       of the operands' transforms, spread evenly
//                                + norm(y) / sqrt(N))              of the product and of the transform back
//              + kPeakErrors * u * max |A| * max |B| / N            of a peak times the error that the other operand's
//                                                                   peak leaves at other frequencies
//
// An output y[n] is accurate if  error <= admitted_error * u * max(|y[n]|, root of the sum of its terms' squares).
//
// The sums of the terms' squares are themselves a convolution, of squared rows, and the same transforms compute them.
// For 16-bit outputs |y[n]| alone decides: the admitted error is so large that few outputs are in doubt.
//
// Rows are multiplied by powers of two, so that their largest values are between 1 and 2: no sum overflows.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// The largest observed errors are 4 to 8 times the sum in brackets, for rows of 250 to 16384 values that are normally
// distributed, positive, alternating, decaying or of very different sizes. The verifier's bound leaves room for 1.4
// times as much.
constexpr float kFftErrors = 8.0f;
constexpr float kPeakErrors = 1.5f;

// Returns the error that an output may have, in 2^-23 of the root of the sum of the squares of its terms, of which
// there are at most `terms`. fp32: less than twice 0.6 sqrt(terms), the error of adding the terms one after the other;
// kernels are allowed twice that error. 16 bits: half an ulp.
template <class Out>
KGEN_DEVICE float admitted_error(int terms) {
    return 4.0f + 0.8f * sqrt(static_cast<float>(terms));
}
template <>
KGEN_DEVICE float admitted_error<fp16>(int) {
    return 4096.0f;
}
template <>
KGEN_DEVICE float admitted_error<bf16>(int) {
    return 32768.0f;
}

// Returns 2^exponent, for an exponent of -126 to 127.
KGEN_DEVICE float power_of_two(int exponent) {
    return bit_cast<float>(static_cast<u32>(exponent + 127) << 23);
}

// The scale of a row: a power of two, or 0 for a row with NaN or Inf, which the transforms take as zeros.
class RowScale {
public:
    // From the largest magnitude. The largest scaled value is from 1 to 2, unless all values are subnormal.
    static KGEN_DEVICE RowScale of_largest(float largest) {
        const int exponent = static_cast<int>(bit_cast<u32>(largest) >> 23) - 127;
        RowScale scale;
        scale.factor_ = 0.0f;
        if (largest < infinity())
            scale.factor_ = power_of_two(largest > 0.0f ? -max(-126, min(exponent, 126)) : 0);
        return scale;
    }

    KGEN_DEVICE bool is_finite() const { return factor_ != 0.0f; }

    // A scaled value is `value` * 2^-exponent.
    KGEN_DEVICE int exponent() const {
        return is_finite() ? 127 - static_cast<int>(bit_cast<u32>(factor_) >> 23) : 0;
    }

    // Scales a value, or returns 0 for a row with NaN or Inf.
    KGEN_DEVICE float apply(float value) const { return is_finite() ? value * factor_ : 0.0f; }

private:
    float factor_;
};

// Decides for each output whether it is accurate.
template <class Out>
class FftAccuracy {
public:
    FftAccuracy() = default;

    // `operands`: the product of the sums of squares of the two operands' scaled values. `outputs`: the sum of squares
    // of all outputs. `points`: N. `peaks`: max |A|^2 * max |B|^2.
    KGEN_DEVICE FftAccuracy(float operands, float outputs, float peaks, float points, int terms) {
        const float error = kFftErrors * (sqrt(operands / points) + sqrt(outputs / points)) +
                            kPeakErrors * sqrt(peaks) / points;
        const float least = error / admitted_error<Out>(terms);
        least_ = least * least;
        // The error of the convolution of squares. The norm of a row of squares is at most their sum.
        error_of_squares_ = 0x1p-22f * kFftErrors * operands / sqrt(points);
    }

    // Whether an output y, in the scale of the operands, is accurate; or an output with this sum of its terms' squares,
    // which a transform computed.
    KGEN_DEVICE bool is_accurate(float y) const { return y * y >= least_; }
    KGEN_DEVICE bool is_accurate_by_squares(float squares) const {
        return squares - error_of_squares_ >= least_;
    }
    // The same, given the exact sum of some of its terms' squares.
    KGEN_DEVICE bool is_accurate_by_terms(float squares) const { return squares >= least_; }

private:
    float least_, error_of_squares_;
};

}  // namespace kgen
