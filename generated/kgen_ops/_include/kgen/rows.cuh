// Adding vectors of storage values, as a residual stream does.
#pragma once

#include "memory.cuh"

namespace kgen {

// a + b in fp32, rounded to a's type; a itself if there is no b.
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

// The same values as the type of an optional tensor: itself, or nothing.
template <class Added, class T, int N>
KGEN_DEVICE Vec<Added, N> as(const Vec<T, N>& values) {
    if constexpr (kPresent<Added>) {
        return values;
    } else {
        return Vec<Added, N>{};
    }
}

}  // namespace kgen
