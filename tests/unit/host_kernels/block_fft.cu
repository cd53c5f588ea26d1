// Convolutions of one block by BlockFft; y has its values with their twist.
#include <kgen/fft/block_fft.cuh>

namespace {

template <int Points, int PerThread>
KGEN_DEVICE void convolve(const float* a, const float* b, float* y) {
    using Fft = kgen::BlockFft<Points, PerThread>;
    static_assert(Fft::kSmemBytes == 8 * (Points + Points / 4) + 4 * (Points + Points / 32),
                  "the formula of search_spaces/timex.yaml");
    Fft fft(kgen::dynamic_smem<kgen::f32x2>());
    fft.init();
    float re[PerThread], im[PerThread];
    for (int r = 0; r < PerThread; ++r) {
        re[r] = b[Fft::point(r)];
    }
    fft.forward(re, im);
    fft.keep(re, im);
    for (int r = 0; r < PerThread; ++r) {
        re[r] = a[Fft::point(r)];
    }
    fft.forward(re, im);
    for (int r = 0; r < PerThread; ++r) {
        const kgen::f32x2 product = kgen::complex_mul({re[r], im[r]}, fft.kept(r));
        re[r] = product.x;
        im[r] = product.y;
    }
    fft.inverse(re, im);
    for (int r = 0; r < PerThread; ++r) {
        y[2 * Fft::point(r)] = re[r];
        y[2 * Fft::point(r) + 1] = im[r];
    }
}

}  // namespace

// a and b are [Points], y is [Points][2]: real and imaginary parts.
#define CONVOLVE(name, points, per_thread)                                               \
    extern "C" __global__ void name(const float* a, const float* b, float* y) { \
        convolve<points, per_thread>(a, b, y);                                      \
    }                                                                                     \
    KGEN_EXPORT(name)

CONVOLVE(convolve_128_by_4, 128, 4);
CONVOLVE(convolve_256_by_8, 256, 8);
CONVOLVE(convolve_1024_by_16, 1024, 16);
CONVOLVE(convolve_2048_by_32, 2048, 32);
