// digest: 03961054d67d
// Rendered by kgen from templates/timex/backward_fft.cu.jinja
// config: fft(points=4096, per_thread=16, wide=true, rows=2, min_blocks=2, parked=false)
// problem: dtype=fp32, w_dtype=fp32
// timex backward by Fourier transforms within a block: some batch rows of gk of a channel per block (toeplitz_fft.cuh),
// and gw of a channel per block (tap_gradient_fft.cuh).
//
//     gk[b, c, u] = sum over t >= u of w[c, T - 1 - (t - u)] * gout[b, c, t]
//     gw[c, T - 1 - d] = sum over b and t of gout[b, c, t] * k[b, c, t - d]
#include "kgen/toeplitz/tap_gradient_fft.cuh"

namespace {

using T = float;
using W = float;

constexpr int kPoints = 4096;         // of a transform, at least T
constexpr int kPerThread = 16;  // points in a thread's registers
constexpr bool kWide = true;            // exchanges move complex numbers, not parts of them
constexpr int kRows = 2;              // batch rows of a block, of gk
constexpr bool kParked = false;        // the sum of spectra is kept in the workspace, not in registers

}  // namespace

extern "C" __global__ void __launch_bounds__(kPoints / kPerThread, 2)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* gk,                       // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::toeplitz_fft<kgen::Triangle::upper, T, W, kPoints, kPerThread, kWide, kRows>(w, gout, gk, B, C,
                                                                            columns, 0.0f);
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kPoints / kPerThread, 2)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* gw,                       // [C, T]
                 float* sums,                 // [blocks][2 points] if kParked
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::tap_gradient_fft<T, W, kPoints, kPerThread, kWide, kParked>(gout, k, gw, sums, B, C,
                                                             columns);
}

KGEN_EXPORT(timex_backward_w);
