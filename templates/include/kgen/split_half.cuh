// fp32 numbers as pairs of fp16, so that tensor cores multiply them at twice TF32's rate (3xfp16).
//
//     x * 2^e = hi + lo * 2^-11 + error,  |error| <= 2^-22 |x * 2^e| + 2^-36
//
// e brings the largest |x| of a group of numbers (a row) to between 2^13 and 2^14. hi and lo have 11
// bits each, as the two TF32 numbers of split_tf32 have, and lo is stored 2^11 times larger than it
// is, so that it does not vanish below fp16's smallest number. Of the product of two such pairs
//
//     hi * hi + (hi * lo + lo * hi) * 2^-11
//
// is kept, in two sums: one of the first term, one of the other two.
//
// fp16 has five bits of exponent, TF32 has eight: the constant part of the error is felt by numbers
// far below the largest of their group. At 2^-27 of it both parts are equal; below 2^-29 (an error of
// 2^-20) a group does not `split`, and its kernel must take TF32.
//
// The idea is published: H. Ootomo and R. Yokota, Recovering single precision accuracy from Tensor
// Cores while surpassing the FP32 theoretical peak performance, 2022.
#pragma once

#include "math.cuh"
#include "memory.cuh"
#include "warp.cuh"

namespace kgen {

// 2^exponent, for -126 .. 127.
KGEN_DEVICE float power_of_two(int exponent) {
    return bit_cast<float>(static_cast<u32>(exponent + 127) << 23);
}

// x * 2^exponent, for -252 .. 254: in two steps, of which the first neither overflows nor rounds unless
// the result does.
KGEN_DEVICE float scale_by(float x, int exponent) {
    const int half = exponent / 2;
    return x * power_of_two(half) * power_of_two(exponent - half);
}

// What decides how a group of numbers is split.
class Magnitudes {
    struct Least {
        static KGEN_DEVICE float apply(float a, float b) { return a < b ? a : b; }
    };

public:
    Magnitudes() = default;
    KGEN_DEVICE Magnitudes(float largest, float smallest)
        : largest_(largest), smallest_(smallest) {}

    KGEN_DEVICE void add(float x) {
        const float size = abs(x);
        largest_ = Max::apply(size, largest_);
        if (size > 0.0f && size < smallest_) smallest_ = size;
    }

    // A row of `columns` values (whole vectors of 16 bytes) in shared memory, this lane's share.
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

    // Over all lanes of the warp.
    KGEN_DEVICE void combine() {
        largest_ = lanes_max<kWarpSize>(largest_);
        smallest_ = lanes_reduce<kWarpSize, Least>(smallest_);
    }

    // Over several, each combined already.
    KGEN_DEVICE void add(const Magnitudes& other) {
        largest_ = Max::apply(other.largest_, largest_);
        smallest_ = Least::apply(other.smallest_, smallest_);
    }

    KGEN_DEVICE float largest() const { return largest_; }
    KGEN_DEVICE float smallest() const { return smallest_; }  // of those that are not 0

    // No NaN, no Inf, nothing that rounds to Inf with fewer bits.
    KGEN_DEVICE bool tame() const { return largest_ < 1.7014118e38f; }

    // The e of this file's head: -114 .. 126.
    KGEN_DEVICE int exponent() const {
        if (!(largest_ > 0.0f)) return 0;
        const int of_largest = static_cast<int>(bit_cast<u32>(largest_) >> 23) - 127;
        return 13 - of_largest < 126 ? 13 - of_largest : 126;
    }

    // Whether pairs of fp16 keep all of them.
    KGEN_DEVICE bool splits() const {
        return tame() && smallest_ * power_of_two(exponent()) >= 1.52587890625e-5f;  // 2^-16
    }

private:
    float largest_ = 0.0f;
    float smallest_ = infinity();
};

// The pairs of two numbers that are scaled already, as hi and lo of the first in the low halves.
KGEN_DEVICE void split_half(float first, float second, u32& hi, u32& lo) {
    hi = pack2<fp16>(first, second);
    const f32x2 back = unpack2<fp16>(hi);
    lo = pack2<fp16>((first - back.x) * 2048.0f, (second - back.y) * 2048.0f);
}

}  // namespace kgen
