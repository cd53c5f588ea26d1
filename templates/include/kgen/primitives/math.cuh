// fp32 functions, with their error on a GPU when compiled without fast-math flags.
//
// The host branches are at least as accurate. Only fma, sqrt and abs, which are correctly rounded, give the same bits
// on a GPU and on the host. Where an instruction flushes subnormal numbers to 0 (in fast_exp2, fast_reciprocal and
// their callers), the host branch does so, too. The other functions keep subnormal numbers on both.
#pragma once

#include "kgen/primitives/core.cuh"

namespace kgen {

// log2(e).
constexpr float kLog2e = 1.4426950408889634f;

// Returns +Inf.
KGEN_DEVICE float infinity() { return bit_cast<float>(0x7f800000u); }

// Returns a * b + c, rounded once.
KGEN_DEVICE float fma(float a, float b, float c) {
#if KGEN_HOST
    return __builtin_fmaf(a, b, c);
#else
    return ::fmaf(a, b, c);
#endif
}

// Returns sqrt(x), correctly rounded.
KGEN_DEVICE float sqrt(float x) {
#if KGEN_HOST
    return __builtin_sqrtf(x);
#else
    return __fsqrt_rn(x);
#endif
}

// Returns 1 / sqrt(x) within 2 ulp (0.51 ulp on the host, which rounds the result in double). The instruction has a
// relative error of 2^-22.9, so that no Newton step is needed.
KGEN_DEVICE float rsqrt(float x) {
#if KGEN_HOST
    return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
#else
    return ::rsqrtf(x);
#endif
}

// Returns e^x within 2 ulp.
KGEN_DEVICE float exp(float x) {
#if KGEN_HOST
    return __builtin_expf(x);
#else
    return ::expf(x);
#endif
}

// Returns 2^x within 2 ulp.
KGEN_DEVICE float exp2(float x) {
#if KGEN_HOST
    return __builtin_exp2f(x);
#else
    return ::exp2f(x);
#endif
}

// Returns the natural logarithm within 1 ulp.
KGEN_DEVICE float log(float x) {
#if KGEN_HOST
    return __builtin_logf(x);
#else
    return ::logf(x);
#endif
}

// Returns log(1 + x) within 1 ulp, also near 0.
KGEN_DEVICE float log1p(float x) {
#if KGEN_HOST
    return __builtin_log1pf(x);
#else
    return ::log1pf(x);
#endif
}

#if KGEN_HOST
// Returns x, or 0 with x's sign where x is subnormal, as instructions with `.ftz` do.
KGEN_DEVICE float flushed(float x) {
    const u32 bits = bit_cast<u32>(x);
    return (bits & 0x7f800000u) != 0 ? x : bit_cast<float>(bits & 0x80000000u);
}
#endif

// Returns the larger number. If one argument is NaN, returns the other.
KGEN_DEVICE float fmax(float a, float b) {
#if KGEN_HOST
    return __builtin_fmaxf(a, b);
#else
    return ::fmaxf(a, b);
#endif
}

// Returns |x|.
KGEN_DEVICE float abs(float x) {
#if KGEN_HOST
    return __builtin_fabsf(x);
#else
    return ::fabsf(x);
#endif
}

// Returns 2^x by the special function unit: 2 ulp, but subnormal inputs and results become 0.
KGEN_DEVICE float fast_exp2(float x) {
#if KGEN_HOST
    return flushed(__builtin_exp2f(x));
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// Returns e^x by the special function unit. The relative error is about (2 + |x| / 2) * 2^-23, from rounding
// x * log2(e) to fp32; for exponents of moderate size, such as decays.
KGEN_DEVICE float fast_exp(float x) { return fast_exp2(x * kLog2e); }

// Returns a / b within 2 ulp for |b| in [2^-126, 2^126]. Above 2^126 the result is 0, or NaN where a is infinite: the
// reciprocal of b would be subnormal. Subnormal results are kept.
KGEN_DEVICE float fast_div(float a, float b) {
#if KGEN_HOST
    const float size = __builtin_fabsf(b);
    return size > 8.50705917e37f && size < infinity() ? a * 0.0f : a / b;
#else
    return __fdividef(a, b);
#endif
}

// Returns 1 / x within 1 ulp for x whose reciprocal is a normal number. Subnormal inputs and results become 0, so that
// 1 / x of a subnormal x is infinite.
KGEN_DEVICE float fast_reciprocal(float x) {
#if KGEN_HOST
    return flushed(1.0f / flushed(x));
#else
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// Returns 1 / (1 + e^-x). The error is about 4 ulp while the result is a normal number.
KGEN_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// Kahan summation: a sum that carries the rounding error of each addition, so that its error does not grow with the
// number of terms. NaN and Inf propagate as in an ordinary sum.
class CompensatedSum {
public:
    KGEN_DEVICE void add(float term) {
        const float corrected = term - lost_;
        const float next = sum_ + corrected;
        const float lost = (next - sum_) - corrected;
        lost_ = lost == lost ? lost : 0.0f;  // Inf - Inf
        sum_ = next;
    }
    KGEN_DEVICE float value() const { return sum_; }

private:
    float sum_ = 0.0f;
    float lost_ = 0.0f;
};

}  // namespace kgen
