// fp32 values as two scaled fp16 terms (3xfp16): tensor cores multiply them at twice the rate of TF32.
//
//     x * 2^e = hi + lo * 2^-11 + error,  |error| <= 2^-22 |x * 2^e| + 2^-36
//
// The exponent e brings the largest |x| of a group of values (a row) to between 2^13 and 2^14. hi and lo have 11
// bits each, like the two TF32 terms of split_tf32. lo is stored multiplied by 2^11, so that it does not
// underflow fp16. The product of two such pairs is computed as
//
//     hi * hi + (hi * lo + lo * hi) * 2^-11
//
// with two accumulators: one for the first term, one for the other two.
//
// fp16 has five bits of exponent, TF32 has eight. The constant part of the error therefore matters for values far
// below the largest of their group: both parts are equal for a value of 2^-27 of the largest. A group with a value
// below 2^-29 of its largest (a relative error of 2^-20) does not fit two fp16 terms, and its kernel must use TF32.
//
// Source: H. Ootomo and R. Yokota, Recovering single precision accuracy from Tensor Cores while surpassing the FP32
// theoretical peak performance, 2022.
#pragma once

#include "kgen/primitives/memory.cuh"
#include "kgen/primitives/warp.cuh"

namespace kgen {

// Returns 2^exponent, for exponents -126 .. 127.
KGEN_DEVICE float power_of_two(int exponent) {
    return bit_cast<float>(static_cast<u32>(exponent + 127) << 23);
}

// Returns x * 2^exponent, for exponents -252 .. 254. Multiplies in two steps; the first neither overflows nor rounds
// unless the result does.
KGEN_DEVICE float scale_by(float x, int exponent) {
    const int half = exponent / 2;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

// The largest and the smallest nonzero magnitude of a group of values, which decide how the group is split.
//
// The bits of magnitudes, compared as integers, are ordered like the magnitudes, with NaN above Inf above all others,
// so that a NaN is kept. The minimum is taken of bits - 1, so that 0 wraps around to the largest value.
class Magnitudes {
public:
    // Adds one value.
    KGEN_DEVICE void add(float x) {
        const u32 size = bit_cast<u32>(x) & 0x7fffffffu;
        largest_ = max(largest_, size);
        smallest_less_1_ = min(smallest_less_1_, size - 1);
    }

    // Adds this lane's share of a row of `columns` values (whole vectors of 16 bytes) in shared memory.
    template <class T>
    KGEN_DEVICE void add_row(const T* row, int columns) {
        constexpr int kVec = 16 / static_cast<int>(sizeof(T));
#pragma unroll 4
        for (int i = lane_id() * kVec; i < columns; i += kWarpSize * kVec) {
            float values[kVec];
            to_floats(*reinterpret_cast<const Vec<T, kVec>*>(row + i), values);
#pragma unroll
            for (int j = 0; j < kVec; ++j) add(values[j]);
        }
    }

    // Adds the values of another group.
    KGEN_DEVICE void add(const Magnitudes& other) {
        largest_ = max(largest_, other.largest_);
        smallest_less_1_ = min(smallest_less_1_, other.smallest_less_1_);
    }

    // Reduces over all lanes of the warp.
    KGEN_DEVICE void combine() {
#pragma unroll
        for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
            largest_ = max(largest_, shfl_xor(largest_, bits));
            smallest_less_1_ = min(smallest_less_1_, shfl_xor(smallest_less_1_, bits));
        }
    }

    // Writes to and reads from two words of shared memory, for a reduction over warps.
    KGEN_DEVICE void write(u32 (&words)[2]) const {
        words[0] = largest_;
        words[1] = smallest_less_1_;
    }
    static KGEN_DEVICE Magnitudes read(const u32 (&words)[2]) {
        Magnitudes read;
        read.largest_ = words[0];
        read.smallest_less_1_ = words[1];
        return read;
    }

    // Whether there is no NaN, no Inf and no value that rounds to Inf in TF32.
    KGEN_DEVICE bool finite() const { return largest_ < 0x7f000000u; }

    // Returns the scaling exponent e, -113 .. 126.
    KGEN_DEVICE int exponent() const {
        if (largest_ == 0) return 0;
        return min(13 - (static_cast<int>(largest_ >> 23) - 127), 126);
    }

    // Whether two fp16 terms represent all values: none is below 2^-16 after scaling.
    KGEN_DEVICE bool fits_split_fp16() const {
        if (largest_ == 0) return true;
        return finite() &&
               bit_cast<float>(smallest_less_1_ + 1) * power_of_two(exponent()) >= 1.52587890625e-5f;
    }

private:
    u32 largest_ = 0;
    u32 smallest_less_1_ = 0xffffffffu;
};

// Splits two scaled values. hi and lo are pairs of fp16, with the terms of `first` in the low half.
KGEN_DEVICE void split_fp16(float first, float second, u32& hi, u32& lo) {
    hi = pack2<fp16>(first, second);
    const f32x2 back = unpack2<fp16>(hi);
    lo = pack2<fp16>((first - back.x) * 2048.0f, (second - back.y) * 2048.0f);
}

}  // namespace kgen
