// Storage types fp16 and bf16, and their conversions to and from fp32.
//
// These types only store values; arithmetic is in fp32. cuda_fp16.h is not used because parsing it takes longer than
// compiling the rest of a kernel.
//
// Conversions to 16 bits round to nearest, ties to even; overflow gives infinity; subnormals are kept. Conversions to
// fp32 are exact. All paths (GPU with the instruction, GPU without it, host) give the same bits, also for NaN, as
// seen on an H200: cvt turns every NaN into 0x7fff or 0x7fffffff, and the other paths do the same. Only bf16 to fp32,
// a shift on all paths, keeps the bits of a NaN.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// IEEE half precision, as stored.
struct fp16 {
    u16 bits;
};

// bfloat16, as stored.
struct bf16 {
    u16 bits;
};

// Two fp32 values.
struct f32x2 {
    float x, y;
};

// The element type of an optional tensor that a problem leaves out; its pointer is null. Kernels test kPresent<T>. A
// kernel is not a template, so that its branches for absent tensors must compile, too: the conversions are there for
// these branches.
struct none {
    none() = default;
    template <class Value>
    KGEN_DEVICE none(const Value&) {}
    KGEN_DEVICE operator float() const { return 0.0f; }
};

// Whether a tensor with element type T is present, which means that T is not `none`.
template <class T>
constexpr bool kPresent = true;
template <>
constexpr bool kPresent<none> = false;

namespace detail {

KGEN_DEVICE float fp16_bits_to_float(u16 bits) {
#if KGEN_HOST
    const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
    const u32 magnitude = bits & 0x7fffu;
    if (magnitude > 0x7c00u) return bit_cast<float>(0x7fffffffu);
    if (magnitude == 0x7c00u) return bit_cast<float>(sign | 0x7f800000u);
    if (magnitude < 0x0400u) {  // subnormal: a multiple of 2^-24, exact in fp32
        const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
        return bit_cast<float>(sign | bit_cast<u32>(value));
    }
    return bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));  // bias 15 -> 127
#else
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#endif
}

KGEN_DEVICE u16 float_to_fp16_bits(float value) {
#if KGEN_HOST
    const u32 bits = bit_cast<u32>(value);
    const u32 sign = bits >> 16 & 0x8000u;
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    // 65520 is halfway between the largest fp16 and the next power of two, and ties go to even.
    if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {  // below 2^-14: subnormal or zero
        // Adding 0.5 puts the unit of the sum at 2^-24, the unit of an fp16 subnormal, so the
        // addition itself rounds to nearest even.
        const u32 sum = bit_cast<u32>(bit_cast<float>(magnitude) + 0.5f);
        return static_cast<u16>(sign | (sum - 0x3f000000u));
    }
    const u32 odd = magnitude >> 13 & 1u;
    return static_cast<u16>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
#else
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#endif
}

KGEN_DEVICE u16 float_to_bf16_bits(float value) {
#if !KGEN_HOST && KGEN_ARCH >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
#else  // the instruction came with sm_80
    const u32 bits = bit_cast<u32>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

}  // namespace detail

// Converts a storage value to fp32, exactly.
KGEN_DEVICE float to_float(float value) { return value; }
KGEN_DEVICE float to_float(none) { return 0.0f; }
KGEN_DEVICE float to_float(fp16 value) { return detail::fp16_bits_to_float(value.bits); }
KGEN_DEVICE float to_float(bf16 value) {
    return bit_cast<float>(static_cast<u32>(value.bits) << 16);
}

// Rounds an fp32 value to storage type T.
template <class T>
KGEN_DEVICE T from_float(float value);
template <>
KGEN_DEVICE float from_float<float>(float value) {
    return value;
}
template <>
KGEN_DEVICE none from_float<none>(float) {
    return none{};
}
template <>
KGEN_DEVICE fp16 from_float<fp16>(float value) {
    return fp16{detail::float_to_fp16_bits(value)};
}
template <>
KGEN_DEVICE bf16 from_float<bf16>(float value) {
    return bf16{detail::float_to_bf16_bits(value)};
}

// A if Condition, else B.
template <bool Condition, class A, class B>
struct SelectType {
    using Type = A;
};
template <class A, class B>
struct SelectType<false, A, B> {
    using Type = B;
};
template <bool Condition, class A, class B>
using Select = typename SelectType<Condition, A, B>::Type;

// Rounds two values to T and packs them into 32 bits, the first in the low half, as in memory. From sm_80 on this is
// one instruction.
template <class T>
KGEN_DEVICE u32 pack2(float first, float second);
template <>
KGEN_DEVICE u32 pack2<fp16>(float first, float second) {
#if !KGEN_HOST && KGEN_ARCH >= 800
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return detail::float_to_fp16_bits(first) |
           static_cast<u32>(detail::float_to_fp16_bits(second)) << 16;
#endif
}
template <>
KGEN_DEVICE u32 pack2<bf16>(float first, float second) {
#if !KGEN_HOST && KGEN_ARCH >= 800
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#else
    return detail::float_to_bf16_bits(first) |
           static_cast<u32>(detail::float_to_bf16_bits(second)) << 16;
#endif
}

// Converts a packed pair to fp32, exactly.
template <class T>
KGEN_DEVICE f32x2 unpack2(u32 pair);
template <>
KGEN_DEVICE f32x2 unpack2<fp16>(u32 pair) {
    return f32x2{detail::fp16_bits_to_float(static_cast<u16>(pair)),
                 detail::fp16_bits_to_float(static_cast<u16>(pair >> 16))};
}
template <>
KGEN_DEVICE f32x2 unpack2<bf16>(u32 pair) {
    return f32x2{bit_cast<float>(pair << 16), bit_cast<float>(pair & 0xffff0000u)};
}

}  // namespace kgen
