// digest: 90216af2b75a
// Rendered by kgen from templates/rmsnorm/backward_naive.cu.jinja
// config: naive(threads=256, row_splits=32)
// problem: dtype=bf16, w_dtype=none, residual_dtype=none, rstd_dtype=fp32
// RMSNorm backward, element by element, for any N, alignment and stride.
//
//     g = dy * (offset + w)    xhat = x * rstd
//     dx = rstd * (g - xhat * mean_n(g * xhat)) + dh    dw = sum_m(dy * xhat)
//
//   rmsnorm_backward_rows      a block per row, which reads the row twice: dx, and rstd to row_rstd [M]
//   rmsnorm_backward_partial   a thread per column and split: dw of every kSplits-th row
//   rmsnorm_backward_weight    a thread per column: adds the kSplits partial sums in order
//
// The order of all additions is fixed, so that results are deterministic.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/types.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::none;
using Residual = kgen::none;
using Rstd = float;

constexpr int kThreads = 256;
constexpr int kSplits = 32;  // partial sums of dw per column

static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_backward_rows(const T* __restrict__ dy,       // [M, N], rows dy_stride_M apart
                      const T* __restrict__ x,        // [M, N], rows x_stride_M apart
                      const W* __restrict__ w,        // [N] or null
                      const Rstd* __restrict__ rstd,  // [M] or null
                      const Residual* __restrict__ dh,   // [M, N], rows dh_stride_M apart, or null
                      T* __restrict__ dx,             // [M, N]
                      float* __restrict__ row_rstd,   // [M]; unused without w
                      kgen::i64 M, kgen::i64 N, kgen::i64 dy_stride_M, kgen::i64 x_stride_M,
                      kgen::i64 dh_stride_M, float eps, float offset) {
    using RowSums = kgen::GroupSum<kThreads, 1, 2>;
    __shared__ RowSums::Scratch scratch;
    RowSums row_sums(scratch);

    for (kgen::i64 row = blockIdx.x; row < M; row += gridDim.x) {
        const T* dy_row = dy + row * dy_stride_M;
        const T* x_row = x + row * x_stride_M;

        // 1. Sums of x * x and of g * x, where g = dy * (offset + w).
        float sums[2] = {};
#pragma unroll 4
        for (kgen::i64 n = threadIdx.x; n < N; n += kThreads) {
            const float value = kgen::to_float(x_row[n]);
            float g = kgen::to_float(dy_row[n]);
            if constexpr (kgen::kPresent<W>) g *= offset + kgen::to_float(w[n]);
            sums[0] = kgen::fma(value, value, sums[0]);
            sums[1] = kgen::fma(g, value, sums[1]);
        }
        row_sums(sums);
        const float columns = static_cast<float>(N);
        float scale = kgen::rsqrt(sums[0] / columns + eps);
        if constexpr (kgen::kPresent<Rstd>) scale = rstd[row];
        if constexpr (kgen::kPresent<W>) {
            if (threadIdx.x == 0) row_rstd[row] = scale;
        }
        const float mean = sums[1] * scale / columns;  // of g * xhat

        // 2. Read again: dx = rstd * (g - xhat * mean) + dh.
#pragma unroll 4
        for (kgen::i64 n = threadIdx.x; n < N; n += kThreads) {
            const float xhat = kgen::to_float(x_row[n]) * scale;
            float g = kgen::to_float(dy_row[n]);
            if constexpr (kgen::kPresent<W>) g *= offset + kgen::to_float(w[n]);
            float result = scale * kgen::fma(-xhat, mean, g);
            if constexpr (kgen::kPresent<Residual>)
                result += kgen::to_float(dh[row * dh_stride_M + n]);
            dx[row * N + n] = kgen::from_float<T>(result);
        }
    }
}

KGEN_EXPORT(rmsnorm_backward_rows);

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_backward_partial(const T* __restrict__ dy, const T* __restrict__ x,
                         const float* __restrict__ row_rstd,
                         float* __restrict__ partial,  // [kSplits, N]
                         kgen::i64 M, kgen::i64 N, kgen::i64 dy_stride_M, kgen::i64 x_stride_M) {
    const kgen::i64 n = static_cast<kgen::i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= N) return;
    const kgen::i64 split = blockIdx.y;
    // Compensated: a plain sum of tens of thousands of rows exceeds the error bound of fp32, and this
    // variant must be accurate for every M.
    kgen::CompensatedSum sum;
#pragma unroll 4
    for (kgen::i64 row = split; row < M; row += kSplits) {
        const float xhat = kgen::to_float(x[row * x_stride_M + n]) * row_rstd[row];
        sum.add(kgen::to_float(dy[row * dy_stride_M + n]) * xhat);
    }
    partial[split * N + n] = sum.value();
}

KGEN_EXPORT(rmsnorm_backward_partial);

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_backward_weight(const float* __restrict__ partial,
                        W* __restrict__ dw,  // [N]
                        kgen::i64 N) {
    const kgen::i64 n = static_cast<kgen::i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (n >= N) return;
    float sum = 0.0f;
#pragma unroll 8
    for (int split = 0; split < kSplits; ++split) sum += partial[split * N + n];
    if constexpr (kgen::kPresent<W>) dw[n] = kgen::from_float<W>(sum);
}

KGEN_EXPORT(rmsnorm_backward_weight);
