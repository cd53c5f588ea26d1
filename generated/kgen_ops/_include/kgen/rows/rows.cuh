// Vectors of a row and of its optional residual.
#pragma once

#include "kgen/primitives/memory.cuh"

namespace kgen {

// Returns a + b, added in fp32 and rounded to the type of a; a itself if the problem has no b.
template <class T, class Added, int N>
KGEN_DEVICE Vec<T, N> add(const Vec<T, N>& a, const Vec<Added, N>& b) {
    if constexpr (!kPresent<Added>) {
        return a;
    } else {
        float left[N], right[N];
        to_floats(a, left);
        to_floats(b, right);
#pragma unroll
        for (int i = 0; i < N; ++i) left[i] += right[i];
        return from_floats<T>(left);
    }
}

// Returns `values` as vectors of an optional tensor: unchanged, or empty if the problem has no such tensor.
template <class Added, class T, int N>
KGEN_DEVICE Vec<Added, N> as(const Vec<T, N>& values) {
    if constexpr (kPresent<Added>) {
        return values;
    } else {
        return Vec<Added, N>{};
    }
}

}  // namespace kgen
