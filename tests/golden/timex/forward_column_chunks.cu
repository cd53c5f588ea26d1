// Rendered by kgen from templates/timex/forward_column_chunks.cu.jinja
// config: column_chunks(threads=64, outputs=4, batch=1, chunk=64)
// problem: dtype=fp32, w_dtype=fp32
// timex forward by FMAs for any T: a block computes a range of outputs of a channel and loops over chunks of the
// columns of k that they depend on (toeplitz_chunks in toeplitz.cuh).
//
//     out[b, c, t] = eps + sum over u <= t of w[c, T - 1 - (t - u)] * k[b, c, u]
#include "kgen/toeplitz/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 64;
constexpr int kOutputs = 4;  // consecutive, per thread and batch row
constexpr int kBatch = 1;      // batch rows of a block
constexpr int kChunk = 64;      // columns in shared memory

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
timex_forward(const W* __restrict__ w,  // [C, T]
              const T* __restrict__ k,  // [B, C, T]
              T* __restrict__ out,      // [B, C, T]
              kgen::i64 B, kgen::i64 C, kgen::i64 columns, float eps) {
    kgen::toeplitz_chunks<kgen::Triangle::lower, T, W, kOutputs, kBatch, kChunk, kThreads>(
        w, k, out, B, C, columns, eps);
}

KGEN_EXPORT(timex_forward);
