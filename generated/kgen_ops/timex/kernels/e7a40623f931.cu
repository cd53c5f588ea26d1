// digest: e7a40623f931
// Rendered by kgen from templates/timex/backward_naive.cu.jinja
// config: naive(threads=128)
// problem: dtype=bf16, w_dtype=fp32
// timex backward, a gradient per thread, all operands from global memory, for any shape.
//
//     gk[b, c, u] = sum over t >= u of w[c, T - 1 - (t - u)] * gout[b, c, t]
//     gw[c, T - 1 - d] = sum over b and t of gout[b, c, t] * k[b, c, t - d]
#include "kgen/toeplitz/toeplitz.cuh"

namespace {

using T = kgen::bf16;
using W = float;

constexpr int kThreads = 128;

// The first element of this thread in a grid-stride loop.
KGEN_DEVICE kgen::i64 first_item() {
    return static_cast<kgen::i64>(blockIdx.x) * kThreads + threadIdx.x;
}

// The stride of that loop.
KGEN_DEVICE kgen::i64 all_threads() { return static_cast<kgen::i64>(gridDim.x) * kThreads; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* __restrict__ gk,          // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    for (kgen::i64 i = first_item(); i < B * C * columns; i += all_threads()) {
        const kgen::i64 row = i / columns, u = i % columns;
        gk[i] = kgen::from_float<T>(kgen::toeplitz_naive<kgen::Triangle::upper>(
            w + row % C * columns, gout + row * columns, u, columns));
    }
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kThreads)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* __restrict__ gw,          // [C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    for (kgen::i64 i = first_item(); i < C * columns; i += all_threads()) {
        const kgen::i64 channel = i / columns * columns, d = columns - 1 - i % columns;
        gw[i] = kgen::from_float<W>(kgen::tap_gradient_naive(gout + channel, k + channel, B,
                                                             C * columns, columns, d));
    }
}

KGEN_EXPORT(timex_backward_w);
