// digest: 09d8e1eb55e9
// Rendered by kgen from templates/rmsnorm/backward_two_pass.cu.jinja
// config: two_pass(row_threads=512, tile_threads=256, vec=8, unroll=1, row_splits=4, load_cache=normal, store_cache=normal)
// problem: N=262144, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm backward in two passes over x and dy, for rows of any length.
//
//     g = dy * (offset + w)    xhat = x * rstd
//     dx = rstd * (g - xhat * mean_n(g * xhat)) + dh    dw = sum_m(dy * xhat)
//
//   rmsnorm_backward_rows     a block per row: rstd and mean(g * xhat), to row_stats [M, 2]
//   rmsnorm_backward_tiles    a block per tile of columns and every kSplits-th row: dx, and partial sums of dw
//   rmsnorm_backward_weight   adds the kSplits partial sums of each column in order
//
// Kernels run in this order on one stream; there is no other synchronisation between blocks.
#include "kgen/primitives/block.cuh"
#include "kgen/rows/columns.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Residual = kgen::none;
using Rstd = kgen::none;

constexpr int kN = 262144;
constexpr int kRowThreads = 512;
constexpr int kTileThreads = 256;
constexpr int kVec = 8;                   // elements per access
constexpr int kUnroll = 1;             // accesses in flight per thread and tensor
constexpr int kSplits = 4;         // blocks per tile, each with every kSplits-th row
constexpr kgen::Cache kLoad = kgen::Cache::normal;
constexpr kgen::Cache kStore = kgen::Cache::normal;

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kSweep = kRowThreads * kVec;
constexpr int kTile = kUnroll * kSweep;
constexpr int kTiles = (kN + kTile - 1) / kTile;
constexpr int kRowLanes = 16;  // of the third kernel
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kN % kVec == 0, "a vector would reach into the next row");
static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");

using Vector = kgen::Vec<T, kVec>;

// offset + w of one vector, or 1 without a weight.
KGEN_DEVICE void factors_of(float (&factors)[kVec], const W* w, float offset) {
#pragma unroll
    for (int part = 0; part < kWeightParts; ++part) {
        float values[kWeightVec] = {};
        if constexpr (kWeighted)
            kgen::to_floats(kgen::load_vec<kWeightVec>(w + part * kWeightVec), values);
#pragma unroll
        for (int i = 0; i < kWeightVec; ++i)
            factors[part * kWeightVec + i] = kWeighted ? offset + values[i] : 1.0f;
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRowThreads)
rmsnorm_backward_rows(const T* __restrict__ dy,        // [M, N], rows dy_stride_M apart
                      const T* __restrict__ x,         // [M, N], rows x_stride_M apart
                      const W* __restrict__ w,         // [N] or null
                      const Rstd* __restrict__ rstd,  // [M] or null
                      float* __restrict__ row_stats,       // [M, 2]: rstd, mean(g * xhat)
                      kgen::i64 dy_stride_M, kgen::i64 x_stride_M, float eps, float offset) {
    using RowSums = kgen::GroupSum<kRowThreads, 1, 2>;
    __shared__ typename RowSums::Scratch scratch;
    RowSums row_sums(scratch);

    const kgen::i64 row = blockIdx.x;
    const T* x_row = x + row * x_stride_M;
    const T* dy_row = dy + row * dy_stride_M;
    const int first = static_cast<int>(threadIdx.x) * kVec;

    // Sums of x * x and of g * x, with an accumulator for each vector in flight.
    float squares[kUnroll] = {};
    float gx[kUnroll] = {};
    for (int tile = 0; tile < kTiles; ++tile) {
        Vector x_held[kUnroll], dy_held[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * kSweep + first;
            x_held[u] = column < kN ? kgen::load_vec<kVec, kLoad>(x_row + column) : Vector{};
            dy_held[u] = column < kN ? kgen::load_vec<kVec, kLoad>(dy_row + column) : Vector{};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * kSweep + first;
            if (column >= kN) continue;
            float values[kVec], gradients[kVec], factors[kVec];
            kgen::to_floats(x_held[u], values);
            kgen::to_floats(dy_held[u], gradients);
            factors_of(factors, w + column, offset);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                squares[u] = kgen::fma(values[i], values[i], squares[u]);
                gx[u] = kgen::fma(gradients[i] * factors[i], values[i], gx[u]);
            }
        }
    }
    float sums[2] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
        sums[0] += squares[u];
        sums[1] += gx[u];
    }
    row_sums(sums);
    if (threadIdx.x == 0) {
        float scale = kgen::rsqrt(sums[0] * (1.0f / kN) + eps);
        if constexpr (kgen::kPresent<Rstd>) scale = rstd[row];
        row_stats[2 * row] = scale;
        row_stats[2 * row + 1] = sums[1] * scale * (1.0f / kN);
    }
}

KGEN_EXPORT(rmsnorm_backward_rows);

extern "C" __global__ void __launch_bounds__(kTileThreads)
rmsnorm_backward_tiles(const T* __restrict__ dy, const T* __restrict__ x, const W* __restrict__ w,
                       const Residual* __restrict__ dh,   // [M, N], rows dh_stride_M apart, or null
                       const float* __restrict__ row_stats,
                       T* __restrict__ dx,                // [M, N]
                       float* __restrict__ partial,       // [kSplits, N]; unused without w
                       kgen::i64 M, kgen::i64 dy_stride_M, kgen::i64 x_stride_M,
                       kgen::i64 dh_stride_M, float offset) {
    const int column =
        (static_cast<int>(blockIdx.x) * kTileThreads + static_cast<int>(threadIdx.x)) * kVec;
    if (column >= kN) return;
    float factors[kVec];
    factors_of(factors, w + column, offset);
    float sum_dw[kVec] = {};

    // Rows blockIdx.y, blockIdx.y + kSplits, ..., kUnroll of them at a time.
    for (kgen::i64 row0 = blockIdx.y; row0 < M; row0 += kUnroll * kSplits) {
        Vector x_held[kUnroll], dy_held[kUnroll];
        kgen::Vec<Residual, kVec> dh_held[kUnroll];
        float scale[kUnroll], mean[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const kgen::i64 row = row0 + u * kSplits;
            if (row >= M) continue;
            x_held[u] = kgen::load_vec<kVec>(x + row * x_stride_M + column);
            dy_held[u] = kgen::load_vec<kVec>(dy + row * dy_stride_M + column);
            if constexpr (kgen::kPresent<Residual>)
                dh_held[u] = kgen::load_vec<kVec>(dh + row * dh_stride_M + column);
            scale[u] = row_stats[2 * row];
            mean[u] = row_stats[2 * row + 1];
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const kgen::i64 row = row0 + u * kSplits;
            if (row >= M) continue;
            float values[kVec], gradients[kVec], added[kVec];
            kgen::to_floats(x_held[u], values);
            kgen::to_floats(dy_held[u], gradients);
            kgen::to_floats(dh_held[u], added);
#pragma unroll
            for (int i = 0; i < kVec; ++i) {
                const float xhat = values[i] * scale[u];
                sum_dw[i] = kgen::fma(gradients[i], xhat, sum_dw[i]);
                values[i] = scale[u] * kgen::fma(-xhat, mean[u], gradients[i] * factors[i]);
                if (kgen::kPresent<Residual>) values[i] += added[i];
            }
            kgen::store_vec<kStore>(dx + row * kN + column, kgen::from_floats<T>(values));
        }
    }
    if constexpr (kWeighted) {
        float* target = partial + static_cast<kgen::i64>(blockIdx.y) * kN + column;
#pragma unroll
        for (int i = 0; i < kVec; ++i) target[i] = sum_dw[i];
    }
}

KGEN_EXPORT(rmsnorm_backward_tiles);

extern "C" __global__ void __launch_bounds__(32 * kRowLanes)
rmsnorm_backward_weight(const float* __restrict__ partial,  // [kSplits, N]
                        W* __restrict__ dw) {               // [N]
    const float sum = kgen::column_sum<kRowLanes>(partial, kSplits, kN);
    const int n = static_cast<int>(blockIdx.x) * 32 + static_cast<int>(threadIdx.x);
    if (threadIdx.x < 32 && n < kN) dw[n] = kgen::from_float<W>(sum);
}

KGEN_EXPORT(rmsnorm_backward_weight);
