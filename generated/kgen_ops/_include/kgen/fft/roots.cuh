// Roots of unity: constants of small orders, and sines of rational angles at run time.
#pragma once

#include "kgen/primitives/types.cuh"

namespace kgen {

// Complex numbers. Functions of the transforms keep real and imaginary parts in arrays of their own instead.
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

// cos(2 pi k / 64) of the first quadrant, 0 <= k <= 16.
KGEN_DEVICE constexpr float first_quadrant_cos(int k) {
    switch (k) {
        case 0: return 1.0f;
        case 1: return 0.99518472667219688624f;
        case 2: return 0.98078528040323044913f;
        case 3: return 0.95694033573220886494f;
        case 4: return 0.92387953251128675613f;
        case 5: return 0.88192126434835502971f;
        case 6: return 0.83146961230254523708f;
        case 7: return 0.77301045336273696081f;
        case 8: return 0.70710678118654752440f;
        case 9: return 0.63439328416364549822f;
        case 10: return 0.55557023301960222474f;
        case 11: return 0.47139673682599764856f;
        case 12: return 0.38268343236508977173f;
        case 13: return 0.29028467725446236764f;
        case 14: return 0.19509032201612826785f;
        case 15: return 0.09801714032956060199f;
        default: return 0.0f;
    }
}

}  // namespace detail

// Returns exp(-2 pi i k / 64), for 0 <= k <= 32. A constant, where k is one.
KGEN_DEVICE constexpr f32x2 root_of_64(int k) {
    return {k <= 16 ? detail::first_quadrant_cos(k) : -detail::first_quadrant_cos(32 - k),
            -detail::first_quadrant_cos(k <= 16 ? 16 - k : k - 16)};
}

}  // namespace kgen
