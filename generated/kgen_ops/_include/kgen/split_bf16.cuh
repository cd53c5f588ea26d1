// fp32 numbers as sums of bf16 numbers, so that tensor cores multiply them at the rate of bf16.
//
//     x = x_0 + x_1 + x_2,   |x_1| <= 2^-8 |x|,   |x_2| <= 2^-17 |x|
//
// With three parts, which lose nothing, the six products x_i y_j of i + j <= 2 are as good as fp32: those
// left out are 2^-24 of the product. With two, the three of i + j <= 1 are better than TF32: 2^-15 where it
// loses 2^-10. bf16 has the exponents of fp32: nothing is scaled, and what the parts of a number below
// 2^-110 lose is less than fp32's smallest normal number.
//
// What bf16 rounds to Inf has parts that are Inf and NaN: a product with it is NaN.
#pragma once

#include "types.cuh"

namespace kgen {

// Pairs of the parts of two numbers, the first in the low halves.
template <int Parts>
KGEN_DEVICE void split_bf16(float first, float second, u32 (&parts)[Parts]) {
#pragma unroll
    for (int i = 0; i < Parts; ++i) {
        parts[i] = pack2<bf16>(first, second);
        if (i + 1 == Parts) break;
        const f32x2 back = unpack2<bf16>(parts[i]);
        first -= back.x;
        second -= back.y;
    }
}

// body(i, j) for the products of parts i and j that count, small ones first: a sum of all of them in one
// accumulator, which tensor cores cut off at each, loses no more than the last ones cost.
template <int Parts, class Body>
KGEN_DEVICE void for_part_products(Body body) {
#pragma unroll
    for (int order = Parts - 1; order >= 0; --order)
#pragma unroll
        for (int i = 0; i <= order; ++i) body(i, order - i);
}

}  // namespace kgen
