// Convolutions of one block by BlockFft.
#include <kgen/fft/block_fft.cuh>

namespace {

template <int Points, int PerThread, bool Wide>
KGEN_DEVICE void convolve(const float* a, const float* b, float* y) {
    using Fft = kgen::BlockFft<Points, PerThread, Wide>;
    constexpr int kLog = PerThread == 4 ? 2 : PerThread == 8 ? 3 : PerThread / 16 + 3;
    constexpr int kRoots = Points / PerThread * kLog + Points / 32 + 256;
    constexpr int kLine = Wide ? 8 * (Points + Points / 16) : 4 * (Points + Points / 32);
    static_assert(Fft::kSmemBytes == 8 * (Points + kRoots) + kLine,
                  "the formula of search_spaces/timex.yaml");
    Fft fft(kgen::dynamic_smem<kgen::f32x2>());
    fft.init();
    float re[PerThread], im[PerThread];
    for (int r = 0; r < PerThread; ++r) {
        re[r] = b[Fft::point(r)];
    }
    fft.forward(re, im);
    fft.keep(re, im);
    kgen::sync_block();
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
    fft.untwist(re, im);
    for (int r = 0; r < PerThread; ++r) {
        y[2 * Fft::point(r)] = re[r];
        y[2 * Fft::point(r) + 1] = im[r];
    }
}

}  // namespace

// a and b are [Points], y is [Points][2]: real and imaginary parts.
#define CONVOLVE(points, per_thread, wide)                                                         \
    extern "C" __global__ void convolve_##points##_by_##per_thread##_##wide(const float* a, const float* b, \
                                                                            float* y) {            \
        convolve<points, per_thread, wide>(a, b, y);                                               \
    }                                                                                              \
    KGEN_EXPORT(convolve_##points##_by_##per_thread##_##wide)

CONVOLVE(128, 4, true);
CONVOLVE(256, 8, false);
CONVOLVE(512, 8, true);
CONVOLVE(512, 16, true);
CONVOLVE(512, 16, false);
CONVOLVE(1024, 16, true);
CONVOLVE(2048, 16, false);
CONVOLVE(2048, 32, true);
CONVOLVE(8192, 16, true);
