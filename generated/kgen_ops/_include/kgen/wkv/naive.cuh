// What the naive kernels of wkv5 and wkv6 compute per step, by one thread, from global memory.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// D of a recurrence in memory whose rows are keys.
template <DecayForm Form, class W>
struct RowDecay {
    static constexpr bool kDecays = true;
    Rows<const W> w;
    KGEN_DEVICE float operator()(i64 t, i64 row) const { return decay_of<Form>(w(t, row)); }
};

// D of a recurrence in memory whose columns are keys.
template <DecayForm Form, class W>
struct ColumnDecay {
    static constexpr bool kDecays = true;
    Rows<const W> w;
    i64 column;
    KGEN_DEVICE float operator()(i64 t, i64) const { return decay_of<Form>(w(t, column)); }
};

// The bonus of a step: sum_k r u k.
template <class T, class U>
KGEN_DEVICE float bonus_of(const T* r, const U* u, const T* k, i64 extent) {
    float sum = 0.0f;
#pragma unroll 8
    for (i64 i = 0; i < extent; ++i)
        sum = fma(to_float(r[i]) * to_float(u[i]), to_float(k[i]), sum);
    return sum;
}

template <class T>
KGEN_DEVICE float dot(const T* a, const T* b, i64 extent) {
    float sum = 0.0f;
#pragma unroll 8
    for (i64 i = 0; i < extent; ++i) sum = fma(to_float(a[i]), to_float(b[i]), sum);
    return sum;
}

}  // namespace kgen::wkv
