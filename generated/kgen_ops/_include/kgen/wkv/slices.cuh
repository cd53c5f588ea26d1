// Sums over slices of a head's keys and values, for wkv5's and wkv6's backward pass. C: a SliceOf
// (backward_config.cuh).
//
// Terms of the slices in device memory, fp32: [B, T, H, ValueSlices, K] of gr, gk and gw, [B, T, H, KeySlices, V] of
// gv.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/warp.cuh"
#include "kgen/wkv/backward_config.cuh"

namespace kgen::wkv {

// Terms [B, T, H, Slices * Features].
template <int Width>
KGEN_DEVICE Rows<float> term_rows(float* terms, i64 steps, i64 H) {
    return {terms, steps * H * Width, H * Width, Width};
}

// Sums over slices, with a warp per step and head. row: its number in B * T * H.
template <class C>
struct AddSlices {
    using T = typename C::T;
    static constexpr int kKeys = C::kHeadKeys, kValues = C::kHeadValues;

    i64 row, rows;
    i64 b, t, h;

    KGEN_DEVICE AddSlices(i64 B, i64 steps, i64 H)
        : row((i64{blockIdx.x} * blockDim.x + thread_rank()) / kWarpSize),
          rows(B * steps * H),
          b(row / (steps * H)),
          t(row / H % steps),
          h(row % H) {}

    KGEN_DEVICE bool exists() const { return row < rows; }

    // A row of a tensor.
    template <class X>
    KGEN_DEVICE X* of(const Rows<X>& tensor) const {
        return tensor.head(b, h).at(t);
    }

    // n = scale * v . gy if a u of the head is not finite, else 0. For a key with such a u, gr and gk lack their terms
    // n u k and n u r, because slices of values have only terms of n.
    template <class U>
    KGEN_DEVICE float value_product(const U* u, const Rows<const T>& v, const Rows<const T>& gy,
                                    float scale) const {
        bool finite = true;
#pragma unroll
        for (int key = lane_id(); key < kKeys; key += kWarpSize)
            finite = finite && is_finite(to_float(u[h * kKeys + key]));
        if (C::kValueSlices == 1 || all(finite)) return 0.0f;
        const T *of_v = of(v), *of_gy = of(gy);
        float sum = 0.0f;
#pragma unroll
        for (int value = lane_id(); value < kValues; value += kWarpSize)
            sum = fma(to_float(of_v[value]), to_float(of_gy[value]), sum);
        return scale * lanes_sum<kWarpSize>(sum);
    }

    // Writes gr or gk. other: k or r.
    template <class U>
    KGEN_DEVICE void keys(const float* terms, float value_product, const U* u,
                          const Rows<const T>& other, const Rows<T>& sums) const {
        const T* of_other = of(other);
        add<C::kValueSlices, kKeys>(terms, of(sums), [&](int key, float sum) {
            const float of_u = to_float(u[h * kKeys + key]);
            if (C::kValueSlices == 1 || is_finite(of_u)) return sum;
            return fma(value_product * of_u, to_float(of_other[key]), sum);
        });
    }

    // gw.
    template <class W>
    KGEN_DEVICE void decays(const float* terms, const Rows<W>& sums) const {
        add<C::kValueSlices, kKeys>(terms, of(sums), [](int, float sum) { return sum; });
    }

    // gv.
    KGEN_DEVICE void values(const float* terms, const Rows<T>& sums) const {
        add<C::kKeySlices, kValues>(terms, of(sums),
                                                   [](int, float sum) { return sum; });
    }

private:
    template <int Slices, int Features, class X, class Whole>
    KGEN_DEVICE void add(const float* terms, X* to, Whole whole) const {
#pragma unroll
        for (int feature = lane_id(); feature < Features; feature += kWarpSize) {
            const float* its = terms + row * (Slices * Features) + feature;
            float sum = its[0];
#pragma unroll
            for (int slice = 1; slice < Slices; ++slice) sum += its[slice * Features];
            to[feature] = from_float<X>(whole(feature, sum));
        }
    }
};

}  // namespace kgen::wkv
