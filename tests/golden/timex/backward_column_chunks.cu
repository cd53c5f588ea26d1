// Rendered by kgen from templates/timex/backward_column_chunks.cu.jinja
// config: column_chunks(threads=64, outputs=8, batch=2, chunk=256)
// problem: dtype=fp32, w_dtype=fp32
// timex backward by FMAs for rows of any length: a block has a stretch of a channel's gk, or of its gw,
// and walks over the columns that they depend on.
#include "kgen/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 64;
constexpr int kOutputs = 8;  // consecutive, per thread, of gk and of gw
constexpr int kBatch = 2;      // batch rows of a block of gk
constexpr int kChunk = 256;      // columns in shared memory

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
