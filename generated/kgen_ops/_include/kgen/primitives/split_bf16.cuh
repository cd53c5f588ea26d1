// fp32 values as sums of bf16 terms, which tensor cores multiply at the rate of bf16.
//
//     x = x_0 + x_1 + x_2,   |x_1| <= 2^-8 |x|,   |x_2| <= 2^-17 |x|
//
// Three terms represent x exactly. The six products x_i y_j with i + j <= 2 have the accuracy of fp32: the omitted
// ones are 2^-24 of the product. With two terms the three products with i + j <= 1 lose 2^-15, where TF32 loses
// 2^-10. bf16 has the exponent range of fp32, so that nothing is scaled; values below 2^-110 lose less than fp32's
// smallest normal number.
//
// A value that bf16 rounds to Inf has the terms Inf and NaN: its products are NaN.
#pragma once

#include "kgen/primitives/types.cuh"

namespace kgen {

// Splits two values into `Terms` terms. terms[i] is a pair of bf16, with the term of `first` in the low half.
template <int Terms>
KGEN_DEVICE void split_bf16(float first, float second, u32 (&terms)[Terms]) {
#pragma unroll
    for (int i = 0; i < Terms; ++i) {
        terms[i] = pack2<bf16>(first, second);
        if (i + 1 == Terms) break;
        const f32x2 back = unpack2<bf16>(terms[i]);
        first -= back.x;
        second -= back.y;
    }
}

// Calls body(i, j) for the products of terms i and j that are computed, the smallest first. Tensor cores truncate
// the accumulator at every addition; in this order the truncation costs least.
template <int Terms, class Body>
KGEN_DEVICE void for_term_products(Body body) {
#pragma unroll
    for (int order = Terms - 1; order >= 0; --order)
#pragma unroll
        for (int i = 0; i <= order; ++i) body(i, order - i);
}

}  // namespace kgen
