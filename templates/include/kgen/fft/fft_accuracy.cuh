// Which outputs of a convolution by Fourier transforms are accurate, and the scales of its rows.
//
// The error of a transform is relative to the norm of its row, and is about the same at all outputs. An output whose
// own terms are small may not be accurate enough. With u = 2^-23 and N points, padding included:
//
//     error        <= kFftErrors * u * (norm(a) * norm(b) / sqrt(N) + root mean square of all N outputs)
//     is accurate:    error <= admitted_error(terms) * u * max(|y|, root of the sum of the terms' squares)
//
// The sums of the terms' squares are themselves a convolution, of squared rows, and the same transforms find them. For
// 16-bit outputs |y| alone decides: they admit so much that few outputs are in doubt.
//
// Rows are multiplied by powers of two, so that their norms are between 1 and 2: no sum overflows, and the two rows
// of a complex one have errors of the same size.
#pragma once

#include "kgen/primitives/math.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// See above. Six standard deviations of the largest errors seen, of rows of 64 to 16384 ordinary values, and of
// positive, alternating, decaying and sparse ones.
constexpr float kFftErrors = 10.0f;

// Returns the error that an output may have, in 2^-23 of the root of the sum of the squares of its terms, of which
// there are at most `terms`. fp32: below twice what adding the terms one after the other loses, 0.48 sqrt(terms), which
// kernels are allowed. 16 bits: half an ulp.
template <class Out>
KGEN_DEVICE float admitted_error(int terms) {
    return 4.0f + 0.7f * sqrt(static_cast<float>(terms));
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

// Returns value * 2^exponent, for an exponent of -252 to 252, also where 2^exponent is no fp32 number.
KGEN_DEVICE float times_power_of_two(float value, int exponent) {
    const int half = exponent / 2;
    return value * power_of_two(half) * power_of_two(exponent - half);
}

// The scale of a row: its values are multiplied by 2^-exponent.
struct RowScale {
    int exponent;
    bool finite;    // whether no value is NaN or Inf; the transforms take other rows as zeros
    float squares;  // sum of the squares of the scaled values

    // From the largest magnitude, which is not below 1 or not above 4 then, unless all values are zeros.
    static KGEN_DEVICE RowScale of_largest(float largest) {
        const int exponent = static_cast<int>(bit_cast<u32>(largest) >> 23) - 127;
        const bool finite = largest < infinity();
        return {finite && largest > 0.0f ? max(-126, min(exponent, 126)) : 0, finite, 0.0f};
    }

    // Makes the norm about 1, given the sum of the squares of values scaled by the largest.
    KGEN_DEVICE void normalise(float sum) {
        const int root = (static_cast<int>(bit_cast<u32>(sum) >> 23) - 127) / 2;
        const int more = sum > 0.0f ? min(root, 126 - exponent) : 0;
        exponent += more;
        squares = sum * power_of_two(-2 * more);
    }

    template <class T>
    KGEN_DEVICE float apply(T value) const {
        return finite ? to_float(value) * power_of_two(-exponent) : 0.0f;
    }
};

// Decides for each output whether it is accurate.
template <class Out>
class FftAccuracy {
public:
    // Sums of squares of scaled values: the product of the operands', and that of all N outputs.
    KGEN_DEVICE FftAccuracy(float operands, float outputs, float points, int terms) {
        const float error = kFftErrors * (sqrt(operands / points) + sqrt(outputs / points));
        const float least = error / admitted_error<Out>(terms);
        least_ = least * least;
        // Of the convolution of squares: no norm of a row of squares exceeds the sum of them.
        error_of_squares_ = 0x1p-22f * kFftErrors * operands / sqrt(points);
    }

    // Of an output in the scale of the operands. `squares`: the sum of its terms' squares, or 0 if it is not known.
    KGEN_DEVICE bool is_accurate(float y, float squares) const {
        return y * y >= least_ || squares - error_of_squares_ >= least_;
    }

private:
    float least_, error_of_squares_;
};

}  // namespace kgen
