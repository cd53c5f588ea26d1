// One column of a state of wkv7 in global memory, and the parts of a step for it; any shape. decay.cuh has the
// formulas.
#pragma once

#include "kgen/wkv7/decay.cuh"

namespace kgen::wkv7 {

// Column `column` of a state [K, V].
struct ColumnInMemory {
    float* first;
    i64 pitch, keys;

    KGEN_DEVICE float& at(i64 key) const { return first[key * pitch]; }

    KGEN_DEVICE void load(const float* state) const {
#pragma unroll 1
        for (i64 i = 0; i < keys; ++i) at(i) = state ? state[i * pitch] : 0.0f;
    }
    KGEN_DEVICE void store(float* state) const {
        if (!state) return;
#pragma unroll 1
        for (i64 i = 0; i < keys; ++i) state[i * pitch] = at(i);
    }

    // sum_k x S.
    template <class T>
    KGEN_DEVICE float read(const T* x) const {
        float sum = 0.0f;
#pragma unroll 1
        for (i64 i = 0; i < keys; ++i) sum = fma(to_float(x[i]), at(i), sum);
        return sum;
    }

    // S = D S + x p + y q, from a step's rows.
    template <DecayForm Form, class W, class T>
    KGEN_DEVICE void update(const W* w, const T* x, float p, const T* y, float q) const {
#pragma unroll 1
        for (i64 i = 0; i < keys; ++i)
            at(i) = fma(decay_of<Form>(to_float(w[i])), at(i),
                        fma(to_float(x[i]), p, to_float(y[i]) * q));
    }

    // S += x p.
    template <class T>
    KGEN_DEVICE void add(const T* x, float p) const {
#pragma unroll 1
        for (i64 i = 0; i < keys; ++i) at(i) = fma(to_float(x[i]), p, at(i));
    }

    // S = D S + x p.
    template <DecayForm Form, class W, class T>
    KGEN_DEVICE void update(const W* w, const T* x, float p) const {
#pragma unroll 1
        for (i64 i = 0; i < keys; ++i)
            at(i) = fma(decay_of<Form>(to_float(w[i])), at(i), to_float(x[i]) * p);
    }
};

}  // namespace kgen::wkv7
