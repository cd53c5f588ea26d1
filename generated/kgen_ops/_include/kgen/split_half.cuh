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

// What decides how a group of numbers is split: the largest and the smallest magnitude but 0.
//
// As integers the bits of magnitudes are in their order, NaN beyond Inf beyond all others, so that no NaN
// gets lost; less 1, 0 is beyond all.
class Magnitudes {
public:
    KGEN_DEVICE void add(float x) {
        const u32 size = bit_cast<u32>(x) & 0x7fffffffu;
        largest_ = max(largest_, size);
        smallest_less_1_ = min(smallest_less_1_, size - 1);
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

    KGEN_DEVICE void add(const Magnitudes& other) {
        largest_ = max(largest_, other.largest_);
        smallest_less_1_ = min(smallest_less_1_, other.smallest_less_1_);
    }

    // Over all lanes of the warp.
    KGEN_DEVICE void combine() {
#pragma unroll
        for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
            largest_ = max(largest_, shfl_xor(largest_, bits));
            smallest_less_1_ = min(smallest_less_1_, shfl_xor(smallest_less_1_, bits));
        }
    }

    // As two words, to show to other warps.
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

    // No NaN, no Inf, nothing that rounds to Inf with fewer bits.
    KGEN_DEVICE bool tame() const { return largest_ < 0x7f000000u; }

    // The e of this file's head: -113 .. 126.
    KGEN_DEVICE int exponent() const {
        if (largest_ == 0) return 0;
        return min(13 - (static_cast<int>(largest_ >> 23) - 127), 126);
    }

    // Whether pairs of fp16 keep all of them: none is below 2^-16 once scaled.
    KGEN_DEVICE bool splits() const {
        if (largest_ == 0) return true;
        return tame() &&
               bit_cast<float>(smallest_less_1_ + 1) * power_of_two(exponent()) >= 1.52587890625e-5f;
    }

private:
    u32 largest_ = 0;
    u32 smallest_less_1_ = 0xffffffffu;
};

// The pairs of two numbers that are scaled already, as hi and lo of the first in the low halves.
KGEN_DEVICE void split_half(float first, float second, u32& hi, u32& lo) {
    hi = pack2<fp16>(first, second);
    const f32x2 back = unpack2<fp16>(hi);
    lo = pack2<fp16>((first - back.x) * 2048.0f, (second - back.y) * 2048.0f);
}

}  // namespace kgen
