// Rendered by kgen from templates/timex/backward_register_tiles.cu.jinja
// config: register_tiles(threads=64, outputs=1, batch=1, balanced=true, taps=1, tap_threads=64)
// problem: dtype=fp32, w_dtype=fp32
// timex backward by FMAs from shared memory, a register tile per thread (toeplitz.cuh).
//
//     gk[b, c, u] = sum over t >= u of w[c, T - 1 - (t - u)] * gout[b, c, t]
//     gw[c, T - 1 - d] = sum over b and t of gout[b, c, t] * k[b, c, t - d]
//
// gk is computed as the forward pass, with the upper triangle. For gw a block has a channel and a thread has a tile
// of consecutive taps, summed over the batch rows one after the other.
#include "kgen/toeplitz/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 64;
constexpr int kOutputs = 1;         // consecutive values of gk, per thread and batch row
constexpr int kBatch = 1;             // batch rows of a block of gk
constexpr bool kBalanced = true;      // pair early and late outputs: equal work
constexpr int kTaps = 1;               // consecutive values of gw per thread
constexpr int kTapThreads = 64;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* __restrict__ gk,          // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::toeplitz_tiles<kgen::Triangle::upper, T, W, kOutputs, kBatch, kBalanced, kThreads>(
        w, gout, gk, B, C, static_cast<int>(columns), 0.0f);
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kTapThreads, 1)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* __restrict__ gw,          // [C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::tap_gradient_tiles<T, W, kTaps, kBalanced, kTapThreads>(gout, k, gw, B, C,
                                                                  static_cast<int>(columns));
}

KGEN_EXPORT(timex_backward_w);
