// Functions of math.cuh, and atomics from several blocks.
#include <kgen/primitives/atomic.cuh>
#include <kgen/primitives/block.cuh>
#include <kgen/primitives/math.cuh>

using kgen::i64;

// out[row][i]: one function per row.
extern "C" __global__ void functions(const float* in, float* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = in[i];
    out[0 * n + i] = kgen::rsqrt(x);
    out[1 * n + i] = kgen::sqrt(x);
    out[2 * n + i] = kgen::exp(-x);
    out[3 * n + i] = kgen::exp2(-x);
    out[4 * n + i] = kgen::log(x);
    out[5 * n + i] = kgen::log1p(x);
    out[6 * n + i] = kgen::sigmoid(x);
    out[7 * n + i] = kgen::fast_exp(-x);
    out[8 * n + i] = kgen::fast_div(1.0f, x);
    out[9 * n + i] = kgen::fma(x, x, -x * x);
}
KGEN_EXPORT(functions);

// out[row][i]: functions whose instructions flush subnormal numbers, then functions that keep them.
extern "C" __global__ void subnormal_numbers(const float* in, float* out, i64 n) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float x = in[i];
    out[0 * n + i] = kgen::fast_exp2(x);
    out[1 * n + i] = kgen::fast_exp(x);
    out[2 * n + i] = kgen::fast_reciprocal(x);
    out[3 * n + i] = kgen::fast_div(3.0f, x);
    out[4 * n + i] = kgen::exp2(x);
    out[5 * n + i] = kgen::exp(x);
    out[6 * n + i] = kgen::fast_div(x, 3.0f);
    out[7 * n + i] = kgen::fma(x, 0.5f, 0.0f);
}
KGEN_EXPORT(subnormal_numbers);

extern "C" __global__ void count_threads(int* total, float* sum) {
    kgen::atomic_add(total, 1);
    kgen::atomic_add(sum, 0.5f);
}
KGEN_EXPORT(count_threads);
