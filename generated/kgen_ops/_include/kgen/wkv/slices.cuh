// Gradients in slices of a head's keys and values, wkv5's and wkv6's backward pass: where a slice's rows and states lie,
// and the sums over slices. C: a SliceOf (backward_config.cuh).
//
// Terms of the slices in device memory, fp32: [ValueSlices, B, T, H, K] of gr, gk and gw, [KeySlices, B, T, H, V] of gv.
#pragma once

#include "kgen/primitives/block.cuh"
#include "kgen/primitives/warp.cuh"
#include "kgen/wkv/backward_config.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv {

// The block's keys and values of states [.., K, V], or null.
template <class C, class X>
KGEN_DEVICE X* slice_of_state(X* states) {
    return states == nullptr ? nullptr
                             : states + C::first_key() * C::kHeadValues + C::first_value();
}

// Rows of the block's slice in the terms of all slices.
template <class C>
struct SliceTerms {
    i64 B, T, H;

    KGEN_DEVICE Rows<float> of_keys(float* terms) const {
        constexpr i64 kKeys = C::kHeadKeys;
        float* first = terms + C::slice() % C::kValueSlices * B * T * H * kKeys + C::first_key();
        return {first, T * H * kKeys, H * kKeys, kKeys};
    }

    KGEN_DEVICE Rows<float> of_values(float* terms) const {
        constexpr i64 kValues = C::kHeadValues;
        float* first =
            terms + C::slice() / C::kValueSlices * B * T * H * kValues + C::first_value();
        return {first, T * H * kValues, H * kValues, kValues};
    }
};

// Sums over slices, by a warp for a step and head: its row of B * T * H.
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

    // n = scale * v . gy if gr and gk lack their terms n u k and n u r, which slices of values cannot write.
    KGEN_DEVICE float bonus(const Rows<const T>& v, const Rows<const T>& gy, float scale) const {
        if constexpr (C::kValueSlices == 1) return 0.0f;
        const T *of_v = of(v), *of_gy = of(gy);
        float sum = 0.0f;
#pragma unroll
        for (int value = lane_id(); value < kValues; value += kWarpSize)
            sum = fma(to_float(of_v[value]), to_float(of_gy[value]), sum);
        return scale * lanes_sum<kWarpSize>(sum);
    }

    // gr or gk. other: k or r.
    template <class U>
    KGEN_DEVICE void keys(const float* terms, float bonus, const U* u, const Rows<const T>& other,
                          const Rows<T>& sums) const {
        const T* of_other = of(other);
        add<C::kValueSlices, kKeys>(terms, of(sums), [&](int key, float sum) {
            if constexpr (C::kValueSlices == 1) return sum;
            return fma(bonus * to_float(u[h * kKeys + key]), to_float(of_other[key]), sum);
        });
    }

    // gw.
    template <class W>
    KGEN_DEVICE void decays(const float* terms, const Rows<W>& sums) const {
        add<C::kValueSlices, kKeys>(terms, of(sums), [](int, float sum) { return sum; });
    }

    // gv.
    KGEN_DEVICE void values(const float* terms, const Rows<T>& sums) const {
        add<C::kSlices / C::kValueSlices, kValues>(terms, of(sums),
                                                   [](int, float sum) { return sum; });
    }

private:
    template <int Slices, int Features, class X, class Whole>
    KGEN_DEVICE void add(const float* terms, X* to, Whole whole) const {
#pragma unroll
        for (int feature = lane_id(); feature < Features; feature += kWarpSize) {
            float sum = terms[row * Features + feature];
#pragma unroll
            for (int slice = 1; slice < Slices; ++slice)
                sum += terms[(slice * rows + row) * Features + feature];
            to[feature] = from_float<X>(whole(feature, sum));
        }
    }
};

}  // namespace kgen::wkv
