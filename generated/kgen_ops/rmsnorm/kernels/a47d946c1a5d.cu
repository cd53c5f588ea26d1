// digest: a47d946c1a5d
// Rendered by kgen from templates/rmsnorm/forward_naive.cu.jinja
// config: naive(threads=256)
// problem: dtype=bf16, w_dtype=fp32
// RMSNorm forward, a block per row, the row read twice: once for the mean square, once to scale it.
// Any N, any alignment, any row stride.
#include "kgen/block.cuh"
#include "kgen/math.cuh"
#include "kgen/types.cuh"

namespace {

using T = kgen::bf16;
using W = float;

constexpr int kThreads = 256;

static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,  // [M, N], rows x_stride_M apart
                const W* __restrict__ w,  // [N]
                T* __restrict__ y,        // [M, N]
                kgen::i64 M, kgen::i64 N, kgen::i64 x_stride_M, float eps) {
    using RowSum = kgen::GroupSum<kThreads, 1>;
    __shared__ RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    for (kgen::i64 row = blockIdx.x; row < M; row += gridDim.x) {
        const T* x_row = x + row * x_stride_M;
        T* y_row = y + row * N;

        // 1. Sum of squares.
        float squares = 0.0f;
#pragma unroll 4
        for (kgen::i64 n = threadIdx.x; n < N; n += kThreads) {
            const float value = kgen::to_float(x_row[n]);
            squares = kgen::fma(value, value, squares);
        }
        const float scale = kgen::rsqrt(row_sum(squares) / static_cast<float>(N) + eps);

        // 2. Read again, scale, write.
#pragma unroll 4
        for (kgen::i64 n = threadIdx.x; n < N; n += kThreads)
            y_row[n] = kgen::from_float<T>(kgen::to_float(x_row[n]) * scale * kgen::to_float(w[n]));
    }
}

KGEN_EXPORT(rmsnorm_forward);
