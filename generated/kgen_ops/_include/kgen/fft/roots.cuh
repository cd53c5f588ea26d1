// Roots of unity: constants of small orders, and sines of rational angles at run time.
#pragma once

#include "kgen/primitives/types.cuh"

namespace kgen {

// Returns a * b of complex numbers. The transforms themselves keep real and imaginary parts in separate arrays.
KGEN_DEVICE f32x2 complex_mul(f32x2 a, f32x2 b) {
    return {a.x * b.x - a.y * b.y, a.x * b.y + a.y * b.x};
}

// Returns exp(i pi x), each part within 2 ulp, for |x| <= 1.
KGEN_DEVICE f32x2 unit_root(float x) {
#if KGEN_HOST
    const double angle = 3.14159265358979323846 * static_cast<double>(x);
    return {static_cast<float>(__builtin_cos(angle)), static_cast<float>(__builtin_sin(angle))};
#else
    f32x2 root;
    sincospif(x, &root.y, &root.x);
    return root;
#endif
}

namespace detail {

// cos(2 pi k / 128) of the first quadrant, 0 <= k <= 32.
KGEN_DEVICE constexpr float first_quadrant_cos(int k) {
    switch (k) {
        case 0: return 1.0f;
        case 1: return 0.99879545620517241f;
        case 2: return 0.99518472667219693f;
        case 3: return 0.98917650996478101f;
        case 4: return 0.98078528040323043f;
        case 5: return 0.97003125319454397f;
        case 6: return 0.95694033573220882f;
        case 7: return 0.94154406518302081f;
        case 8: return 0.92387953251128674f;
        case 9: return 0.90398929312344334f;
        case 10: return 0.88192126434835505f;
        case 11: return 0.85772861000027212f;
        case 12: return 0.83146961230254524f;
        case 13: return 0.80320753148064494f;
        case 14: return 0.77301045336273699f;
        case 15: return 0.74095112535495911f;
        case 16: return 0.70710678118654757f;
        case 17: return 0.67155895484701833f;
        case 18: return 0.63439328416364549f;
        case 19: return 0.59569930449243347f;
        case 20: return 0.55557023301960229f;
        case 21: return 0.51410274419322166f;
        case 22: return 0.47139673682599781f;
        case 23: return 0.42755509343028220f;
        case 24: return 0.38268343236508984f;
        case 25: return 0.33688985339222005f;
        case 26: return 0.29028467725446233f;
        case 27: return 0.24298017990326398f;
        case 28: return 0.19509032201612833f;
        case 29: return 0.14673047445536175f;
        case 30: return 0.09801714032956077f;
        case 31: return 0.04906767432741813f;
        default: return 0.0f;
    }
}

}  // namespace detail

// Returns exp(-2 pi i k / 128), for 0 <= k <= 64. The result is a constant if k is one.
KGEN_DEVICE constexpr f32x2 root_of_128(int k) {
    return {k <= 32 ? detail::first_quadrant_cos(k) : -detail::first_quadrant_cos(64 - k),
            -detail::first_quadrant_cos(k <= 32 ? 32 - k : k - 32)};
}

}  // namespace kgen
