// Products in fp64, with fragments put together value by value as mma_f64.cuh documents them. Each warp of a block has
// matrices of its own.
#include <kgen/primitives/mma_f64.cuh>

#if KGEN_HOST || KGEN_ARCH == 0 || KGEN_ARCH >= 800

namespace {

// out[16][8] = c + a[16][K] b[K][8], then the same product again on top: out[0] and out[1].
template <int K>
KGEN_DEVICE void multiply(const double* a, const double* b, const double* c, double* out) {
    const kgen::MmaLane at = kgen::mma_lane();
    const int warp = kgen::thread_rank() / 32, g = at.g, q = at.q;
    a += warp * 16 * K, b += warp * 8 * K, c += warp * 128, out += warp * 256;
    double fa[K / 2], fb[K / 4], fc[4];
    for (int j = 0; j < K / 4; ++j) {
        fa[2 * j] = a[g * K + 4 * j + q];
        fa[2 * j + 1] = a[(g + 8) * K + 4 * j + q];
        fb[j] = b[(4 * j + q) * 8 + g];
    }
    for (int i = 0; i < 4; ++i) fc[i] = c[(g + i / 2 * 8) * 8 + 2 * q + i % 2];
    for (int n = 0; n < 2; ++n) {
        kgen::mma_f64(fc, fa, fb);
        for (int i = 0; i < 4; ++i) out[n * 128 + (g + i / 2 * 8) * 8 + 2 * q + i % 2] = fc[i];
    }
}

}  // namespace

#define MULTIPLY(K)                                                                                    \
    extern "C" __global__ void mma_f64_##K(const double* a, const double* b, const double* c, double* out) { \
        multiply<K>(a, b, c, out);                                                                     \
    }                                                                                                  \
    KGEN_EXPORT(mma_f64_##K)

MULTIPLY(4);
MULTIPLY(8);
MULTIPLY(16);

#endif
