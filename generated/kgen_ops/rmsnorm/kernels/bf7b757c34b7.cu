// digest: bf7b757c34b7
// Rendered by kgen from templates/rmsnorm/forward_naive.cu.jinja
// config: naive(threads=256)
// problem: dtype=fp32, w_dtype=none, residual_dtype=none, rstd_dtype=fp32
// RMSNorm forward, a block per row, element by element, for any N, alignment and row stride.
//
//     y[m, n] = x[m, n] * (offset + w[n]) * rsqrt(mean_n(x[m, n]^2) + eps)
//
// The row is read twice: once for the mean square, once to scale it.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"

namespace {

using T = float;
using W = kgen::none;
using Residual = kgen::none;
using Rstd = float;

constexpr int kThreads = 256;

static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

// The element that is normalised: x, or x + residual as it is stored in h.
KGEN_DEVICE T normalised(const T* x_row, const Residual* residual_row, kgen::i64 n) {
    if constexpr (kgen::kPresent<Residual>) {
        return kgen::from_float<T>(kgen::to_float(x_row[n]) + kgen::to_float(residual_row[n]));
    } else {
        return x_row[n];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,             // [M, N], rows x_stride_M apart
                const W* __restrict__ w,             // [N] or null
                const Residual* __restrict__ residual,  // [M, N], its own row stride, or null
                T* __restrict__ y,                   // [M, N]
                Residual* __restrict__ h,               // [M, N] or null
                Rstd* __restrict__ rstd,            // [M] or null
                kgen::i64 M, kgen::i64 N, kgen::i64 x_stride_M, kgen::i64 residual_stride_M,
                float eps, float offset) {
    using RowSum = kgen::GroupSum<kThreads, 1>;
    __shared__ RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    for (kgen::i64 row = blockIdx.x; row < M; row += gridDim.x) {
        const T* x_row = x + row * x_stride_M;
        const Residual* residual_row = residual + row * residual_stride_M;
        T* y_row = y + row * N;

        // 1. Sum of squares.
        float squares = 0.0f;
#pragma unroll 4
        for (kgen::i64 n = threadIdx.x; n < N; n += kThreads) {
            const float value = kgen::to_float(normalised(x_row, residual_row, n));
            squares = kgen::fma(value, value, squares);
        }
        const float scale = kgen::rsqrt(row_sum(squares) / static_cast<float>(N) + eps);
        if constexpr (kgen::kPresent<Rstd>) {
            if (threadIdx.x == 0) rstd[row] = scale;
        }

        // 2. Read again, scale, write.
#pragma unroll 4
        for (kgen::i64 n = threadIdx.x; n < N; n += kThreads) {
            const T value = normalised(x_row, residual_row, n);
            float result = kgen::to_float(value) * scale;
            if constexpr (kgen::kPresent<W>) result *= offset + kgen::to_float(w[n]);
            y_row[n] = kgen::from_float<T>(result);
            if constexpr (kgen::kPresent<Residual>) h[row * N + n] = value;
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
