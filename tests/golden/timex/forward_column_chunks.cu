// Rendered by kgen from templates/timex/forward_column_chunks.cu.jinja
// config: column_chunks(threads=64, outputs=8, batch=2, chunk=256)
// problem: dtype=fp32, w_dtype=fp32
// timex forward by FMAs for rows of any length: a block has a stretch of a channel's outputs and walks
// over the columns that they depend on.
#include "kgen/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 64;
constexpr int kOutputs = 8;  // consecutive, per thread and batch row
constexpr int kBatch = 2;      // batch rows of a block
constexpr int kChunk = 256;      // columns in shared memory

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
