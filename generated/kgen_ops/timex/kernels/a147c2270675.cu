// digest: a147c2270675
// Rendered by kgen from templates/timex/forward_fft.cu.jinja
// config: fft(points=4096, per_thread=8, wide=true, rows=2, min_blocks=2)
// problem: dtype=fp32, w_dtype=fp32
// timex forward by Fourier transforms within a block, some batch rows of a channel per block (toeplitz_fft.cuh).
//
//     out[b, c, t] = eps + sum over u <= t of w[c, T - 1 - (t - u)] * k[b, c, u]
#include "kgen/toeplitz/toeplitz_fft.cuh"

namespace {

using T = float;
using W = float;

constexpr int kPoints = 4096;         // of a transform, at least T
constexpr int kPerThread = 8;  // points in a thread's registers
constexpr bool kWide = true;            // exchanges move complex numbers, not parts of them
constexpr int kRows = 2;              // batch rows of a block

}  // namespace

extern "C" __global__ void __launch_bounds__(kPoints / kPerThread, 2)
timex_forward(const W* __restrict__ w,  // [C, T]
              const T* __restrict__ k,  // [B, C, T]
              T* out,                   // [B, C, T]
              kgen::i64 B, kgen::i64 C, kgen::i64 columns, float eps) {
    kgen::toeplitz_fft<kgen::Triangle::lower, T, W, kPoints, kPerThread, kWide, kRows>(w, k, out, B, C,
                                                                            columns, eps);
}

KGEN_EXPORT(timex_forward);
