// digest: 7bc7b5c8aa24
// Rendered by kgen from templates/timex/forward_naive.cu.jinja
// config: naive(threads=128)
// problem: dtype=fp16, w_dtype=fp32
// timex forward, an output per thread, all operands from global memory, for any shape.
//
//     out[b, c, t] = eps + sum over u <= t of w[c, T - 1 - (t - u)] * k[b, c, u]
#include "kgen/toeplitz/toeplitz.cuh"

namespace {

using T = kgen::fp16;
using W = float;

constexpr int kThreads = 128;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
timex_forward(const W* __restrict__ w,  // [C, T]
              const T* __restrict__ k,  // [B, C, T]
              T* __restrict__ out,      // [B, C, T]
              kgen::i64 B, kgen::i64 C, kgen::i64 columns, float eps) {
    const kgen::i64 step = static_cast<kgen::i64>(gridDim.x) * kThreads;
    for (kgen::i64 i = static_cast<kgen::i64>(blockIdx.x) * kThreads + threadIdx.x;
         i < B * C * columns; i += step) {
        const kgen::i64 row = i / columns, t = i % columns;
        const float sum = kgen::toeplitz_naive<kgen::Triangle::lower>(
            w + row % C * columns, k + row * columns, t, columns);
        out[i] = kgen::from_float<T>(sum + eps);
    }
}

KGEN_EXPORT(timex_forward);
