// digest: 0c3761056b9f
// Rendered by kgen from templates/rmsnorm/forward_two_pass.cu.jinja
// config: two_pass(threads=1024, vec=8, unroll=1, reverse=true, load_cache=evict_last, reread_cache=normal, store_cache=normal)
// problem: N=8192, dtype=bf16, w_dtype=bf16, residual_dtype=bf16, rstd_dtype=none
// RMSNorm forward, two passes over a row by one block, for rows of any length.
//
//     y[m, n] = x[m, n] * (offset + w[n]) * rsqrt(mean_n(x[m, n]^2) + eps)
//
// Pass 1 reduces the squares, pass 2 reads the row from L1 or L2 and writes it scaled. Each thread keeps
// kUnroll vectors in flight and needs few registers, so that many blocks are resident. Pass 2 may run in
// reverse order, which begins with the lines that the caches loaded last.
#include "kgen/primitives/block.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/primitives/memory.cuh"
#include "kgen/rows/rows.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Residual = kgen::bf16;
using Rstd = kgen::none;

constexpr int kN = 8192;
constexpr int kThreads = 1024;
constexpr int kVec = 8;                     // elements per access
constexpr int kUnroll = 1;               // loads in flight per thread
constexpr bool kReverse = true;          // pass 2 runs from the end of the row
constexpr kgen::Cache kLoad = kgen::Cache::evict_last;
constexpr kgen::Cache kReread = kgen::Cache::normal;
constexpr kgen::Cache kStore = kgen::Cache::normal;

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

// A tile is kUnroll vectors of every thread. The last tile of a row may be partial.
constexpr int kTile = kUnroll * kThreads * kVec;
constexpr int kTiles = (kN + kTile - 1) / kTile;

using Vector = kgen::Vec<T, kVec>;

// Whether a vector that starts at `column` lies in the row. Always true if tiles divide the row.
KGEN_DEVICE bool inside(int column) { return kN % kTile == 0 || column < kN; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,             // [M, N], rows x_stride_M apart
                const W* __restrict__ w,             // [N] or null
                const Residual* __restrict__ residual,  // [M, N], its own row stride, or null
                T* __restrict__ y,                   // [M, N]
                Residual* h,                            // [M, N] or null
                Rstd* __restrict__ rstd,            // [M] or null
                kgen::i64 x_stride_M, kgen::i64 residual_stride_M, float eps, float offset) {
    using RowSum = kgen::GroupSum<kThreads, 1>;
    __shared__ typename RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    const kgen::i64 row = blockIdx.x;
    const T* x_row = x + row * x_stride_M;
    const Residual* residual_row = residual + row * residual_stride_M;
    Residual* h_row = h + row * kN;
    T* y_row = y + row * kN;
    const int first = static_cast<int>(threadIdx.x) * kVec;

    // 1. Sum of squares, with an accumulator for each vector in flight.
    float sum[kUnroll] = {};
    for (int tile = 0; tile < kTiles; ++tile) {
        Vector held[kUnroll];
        kgen::Vec<Residual, kVec> residuals[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * (kThreads * kVec) + first;
            held[u] = inside(column) ? kgen::load_vec<kVec, kLoad>(x_row + column) : Vector{};
            residuals[u] = kgen::Vec<Residual, kVec>{};
            if (kgen::kPresent<Residual> && inside(column))
                residuals[u] = kgen::load_vec<kVec, kLoad>(residual_row + column);
        }
        if constexpr (kgen::kPresent<Residual>) {  // normalise h, as it is stored
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int column = tile * kTile + u * (kThreads * kVec) + first;
                held[u] = kgen::add(held[u], residuals[u]);
                if (inside(column))
                    kgen::store_vec(h_row + column, kgen::as<Residual>(held[u]));
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            float values[kVec];
            kgen::to_floats(held[u], values);
#pragma unroll
            for (int i = 0; i < kVec; ++i) sum[u] = kgen::fma(values[i], values[i], sum[u]);
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) squares += sum[u];
    const float scale = kgen::rsqrt(row_sum(squares) * (1.0f / kN) + eps);

    if constexpr (kgen::kPresent<Rstd>) {
        if (threadIdx.x == 0) rstd[row] = scale;
    }

    // 2. Read the row again, scale, write. With a residual a thread reads what it wrote to h itself.
    const T* source = kgen::kPresent<Residual> ? reinterpret_cast<const T*>(h_row) : x_row;
    for (int step = 0; step < kTiles; ++step) {
        const int tile = kReverse ? kTiles - 1 - step : step;
        Vector held[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * (kThreads * kVec) + first;
            held[u] = inside(column) ? kgen::load_vec<kVec, kReread>(source + column) : Vector{};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * (kThreads * kVec) + first;
            if (!inside(column)) continue;
            float values[kVec];
            kgen::to_floats(held[u], values);
#pragma unroll
            for (int part = 0; part < kWeightParts; ++part) {
                float factors[kWeightVec] = {};
                if constexpr (kWeighted)
                    kgen::to_floats(kgen::load_vec<kWeightVec>(w + (column + part * kWeightVec)),
                                    factors);
#pragma unroll
                for (int i = 0; i < kWeightVec; ++i) {
                    float& value = values[part * kWeightVec + i];
                    value = value * scale * (kWeighted ? offset + factors[i] : 1.0f);
                }
            }
            kgen::store_vec<kStore>(y_row + column, kgen::from_floats<T>(values));
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
