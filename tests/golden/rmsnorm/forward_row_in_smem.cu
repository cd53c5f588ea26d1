// Rendered by kgen from templates/rmsnorm/forward_row_in_smem.cu.jinja
// config: row_in_smem(threads=64, vec=8, reduction=shuffle)
// problem: N=4096, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, a block per row, the row read once and kept in shared memory.
//
//     y[m, n] = x[m, n] * (offset + w[n]) * rsqrt(mean_n(x[m, n]^2) + eps)
//
// The published kernels `shared memory`, `warp shuffle`, `float4 shared` and `float4 warp`.
//
// Shared memory: T row[N]; the scratch of the reduction is static.
// Synchronisation: a thread reads only the vectors of the row that it wrote itself, so that the barriers of
// block_sum() are the only ones.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;

enum class Reduction { tree, shuffle };

constexpr int kN = 4096;
constexpr int kThreads = 64;
constexpr int kVec = 8;                   // elements per access
constexpr Reduction kReduction = Reduction::shuffle;

constexpr int kVectors = kN / kVec;
constexpr int kSteps = (kVectors + kThreads - 1) / kThreads;  // vectors per thread, at most
constexpr int kUnroll = kSteps < 8 ? kSteps : 8;              // accesses in flight per thread
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kVec == 0, "a vector would reach into the next row");
static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

using Vector = kgen::Vec<T, kVec>;

// Returns the sum over the block. `tree` halves the number of active threads at each barrier, as the first
// published versions did; `shuffle` reduces within warps and needs one barrier.
KGEN_DEVICE float block_sum(float value) {
    if constexpr (kReduction == Reduction::shuffle) {
        using RowSum = kgen::GroupSum<kThreads, 1>;
        __shared__ RowSum::Scratch scratch;
        RowSum row_sum(scratch);
        return row_sum(value);
    } else {
        __shared__ float partial[kThreads];
        const int thread = threadIdx.x;
        partial[thread] = value;
        kgen::sync_block();
#pragma unroll
        for (int active = kThreads / 2; active > 0; active /= 2) {
            if (thread < active) partial[thread] += partial[thread + active];
            kgen::sync_block();
        }
        return partial[0];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,  // [M, N], rows x_stride_M apart
                const W* __restrict__ w,  // [N]
                T* __restrict__ y,        // [M, N]
                kgen::i64 M, kgen::i64 x_stride_M, float eps, float offset) {
    const kgen::i64 row = blockIdx.x;
    const T* x_row = x + row * x_stride_M;
    T* y_row = y + row * kN;

    Vector* staged = kgen::dynamic_smem<Vector>();
    const int thread = threadIdx.x;

    // 1. Stage the row.
#pragma unroll kUnroll
    for (int v = thread; v < kVectors; v += kThreads)
        staged[v] = kgen::load_vec<kVec, kgen::Cache::no_l1>(x_row + v * kVec);

    // 2. Sum of squares.
    float squares = 0.0f;
#pragma unroll kUnroll
    for (int v = thread; v < kVectors; v += kThreads) {
        float values[kVec];
        kgen::to_floats(staged[v], values);
#pragma unroll
        for (int i = 0; i < kVec; ++i) squares = kgen::fma(values[i], values[i], squares);
    }
    const float scale = kgen::rsqrt(block_sum(squares) * (1.0f / kN) + eps);

    // 3. Scale and write.
#pragma unroll kUnroll
    for (int v = thread; v < kVectors; v += kThreads) {
        float values[kVec];
        kgen::to_floats(staged[v], values);
#pragma unroll
        for (int part = 0; part < kWeightParts; ++part) {
            float factors[kWeightVec];
            kgen::to_floats(kgen::load_vec<kWeightVec>(w + v * kVec + part * kWeightVec), factors);
#pragma unroll
            for (int i = 0; i < kWeightVec; ++i) {
                float& value = values[part * kWeightVec + i];
                value = value * scale * (offset + factors[i]);
            }
        }
        kgen::store_vec<kgen::Cache::streaming>(y_row + v * kVec, kgen::from_floats<T>(values));
    }
}

KGEN_EXPORT(rmsnorm_forward);
