// digest: 11c860e49431
// Rendered by kgen from templates/rmsnorm/forward_row_per_block.cu.jinja
// config: row_per_block(threads=256, vec=8, load_cache=normal, store_cache=normal)
// problem: N=4096, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, a block per row, for calls of a few microseconds.
//
//     y[m, n] = x[m, n] * (offset + w[n]) * rsqrt(mean_n(x[m, n]^2) + eps)
//
// Such a call takes as long as its chain of dependent instructions. So loads have no condition: a thread beyond the
// row's end loads the row's last vector, and adds and stores nothing. x is loaded before w, and what addresses depend
// on comes first in the parameter list, in one line of the constant cache.
//
// Synchronisation: one block barrier, inside GroupReduce; none if kThreads is 32.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/rows/rows.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Residual = kgen::none;
using Rstd = kgen::none;

constexpr int kN = 4096;
constexpr int kThreads = 256;
constexpr int kVec = 8;  // elements per access
constexpr kgen::Cache kLoad = kgen::Cache::normal;
constexpr kgen::Cache kStore = kgen::Cache::normal;

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kSweep = kThreads * kVec;             // elements that the block moves per step
constexpr int kSteps = (kN + kSweep - 1) / kSweep;  // vectors per thread
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kVec == 0, "a vector would reach into the next row");
static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(kThreads >= 32 && kThreads <= 1024, "a block is 32 to 1024 threads");

struct Weight {  // of one vector
    kgen::Vec<W, kWeightVec> part[kWeightParts];
};

// This thread's column in `step`.
KGEN_DEVICE int column_of(int step) {
    return step * kSweep + static_cast<int>(threadIdx.x) * kVec;
}

// Whether that column lies in the row. A compile-time constant for all but the last step.
KGEN_DEVICE bool inside(int step) { return (step + 1) * kSweep <= kN || column_of(step) < kN; }

// The same, or the row's last vector.
KGEN_DEVICE int loaded_column(int step) {
    return (step + 1) * kSweep <= kN ? column_of(step) : kgen::min(column_of(step), kN - kVec);
}

template <class Source>
KGEN_DEVICE void load_row(kgen::Vec<Source, kVec> (&held)[kSteps], const Source* row) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        held[step] = kgen::load_vec<kVec, kLoad>(row + loaded_column(step));
}

// Four accumulators, so that the additions do not depend on each other.
KGEN_DEVICE float sum_of_squares(const kgen::Vec<T, kVec>& held) {
    float values[kVec], sum[4] = {};
    kgen::to_floats(held, values);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i % 4] = kgen::fma(values[i], values[i], sum[i % 4]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

KGEN_DEVICE kgen::Vec<T, kVec> scaled(const kgen::Vec<T, kVec>& held, const Weight& weight, float scale,
                                      float offset) {
    float values[kVec];
    kgen::to_floats(held, values);
#pragma unroll
    for (int part = 0; part < kWeightParts; ++part) {
        float factors[kWeightVec];
        kgen::to_floats(weight.part[part], factors);
#pragma unroll
        for (int i = 0; i < kWeightVec; ++i) {
            float& value = values[part * kWeightVec + i];
            value = value * scale * (kWeighted ? offset + factors[i] : 1.0f);
        }
    }
    return kgen::from_floats<T>(values);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,  // [M, N], rows x_stride_M apart
                const W* __restrict__ w,  // [N] or null
                T* __restrict__ y,        // [M, N]
                kgen::i64 x_stride_M, float eps, float offset, kgen::i64 M,
                const Residual* __restrict__ residual,  // [M, N], its own row stride, or null
                kgen::i64 residual_stride_M,
                Residual* __restrict__ h,  // [M, N] or null
                Rstd* __restrict__ rstd) {  // [M] or null
    using RowSum = kgen::GroupReduce<kgen::Sum, kThreads, 1, 1, kgen::Partials::read>;
    __shared__ typename RowSum::Scratch scratch;
    RowSum row_sum(scratch);
    const kgen::i64 row = blockIdx.x;
    const kgen::u32 zero = static_cast<kgen::u32>(M >> 63);

    // 1. Issue every load before the first use.
    kgen::Vec<T, kVec> held[kSteps];
    load_row(held, x + row * x_stride_M);
    kgen::Vec<Residual, kVec> residuals[kSteps];
    if constexpr (kgen::kPresent<Residual>) load_row(residuals, residual + row * residual_stride_M);
    Weight weight[kSteps] = {};
    if constexpr (kWeighted) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int part = 0; part < kWeightParts; ++part)
                weight[step].part[part] =
                    kgen::load_vec<kWeightVec>(w + loaded_column(step) + part * kWeightVec);
        // Otherwise the compiler moves these loads behind the barrier.
#pragma unroll
        for (int step = 0; step < kSteps; ++step) kgen::opaque(weight[step], zero);
    }

    // 2. Add the residual. The sum is normalised as it is stored in h, rounded.
    if constexpr (kgen::kPresent<Residual>) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            held[step] = kgen::add(held[step], residuals[step]);
            if (inside(step))
                kgen::store_vec<kStore>(h + row * kN + column_of(step), kgen::as<Residual>(held[step]));
        }
    }

    // 3. Mean square.
    float squares = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const float sum = sum_of_squares(held[step]);
        squares += inside(step) ? sum : 0.0f;
    }
    const float scale = kgen::rsqrt(row_sum(squares) * (1.0f / kN) + eps);

    // 4. Scale and write.
    if constexpr (kgen::kPresent<Rstd>) {
        if (threadIdx.x == 0) rstd[row] = scale;
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        if (inside(step))
            kgen::store_vec<kStore>(y + row * kN + column_of(step),
                                    scaled(held[step], weight[step], scale, offset));
}

KGEN_EXPORT(rmsnorm_forward);
