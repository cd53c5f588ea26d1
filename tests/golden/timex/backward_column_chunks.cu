// Rendered by kgen from templates/timex/backward_column_chunks.cu.jinja
// config: column_chunks(threads=64, outputs=4, batch=1, chunk=64)
// problem: dtype=fp32, w_dtype=fp32
// timex backward by FMAs for any T: a block computes a range of gk, or of gw, of a channel and loops over chunks of
// the columns that they depend on (toeplitz.cuh).
//
//     gk[b, c, u] = sum over t >= u of w[c, T - 1 - (t - u)] * gout[b, c, t]
//     gw[c, T - 1 - d] = sum over b and t of gout[b, c, t] * k[b, c, t - d]
#include "kgen/toeplitz/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 64;
constexpr int kOutputs = 4;  // consecutive, per thread, of gk and of gw
constexpr int kBatch = 1;      // batch rows of a block of gk
constexpr int kChunk = 64;      // columns in shared memory

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* __restrict__ gk,          // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::toeplitz_chunks<kgen::Triangle::upper, T, W, kOutputs, kBatch, kChunk, kThreads>(
        w, gout, gk, B, C, columns, 0.0f);
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kThreads, 1)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* __restrict__ gw,          // [C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::tap_gradient_chunks<T, W, kOutputs, kChunk, kThreads>(gout, k, gw, B, C, columns);
}

KGEN_EXPORT(timex_backward_w);
