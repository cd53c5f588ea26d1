// digest: c5e479a6838d
// Rendered by kgen from templates/rmsnorm/forward_two_reads.cu.jinja
// config: two_reads(threads=1024, vec=8, unroll=2, backward=false, load_cache=evict_last, reread_cache=normal, store_cache=evict_first)
// problem: N=32768, dtype=bf16, w_dtype=bf16, residual_dtype=none, rstd_dtype=none
// RMSNorm forward, a block per row and two wide reads, `kUnroll` vectors in flight per thread: few
// registers, so that many blocks are resident, and a row of any length. The caches serve the second
// read, from the end backwards (what they saw last) or in the order of the first.
#include "kgen/block.cuh"
#include "kgen/math.cuh"
#include "kgen/memory.cuh"
#include "kgen/rows.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;
using Added = kgen::none;
using Saved = kgen::none;

constexpr int kN = 32768;
constexpr int kThreads = 1024;
constexpr int kVec = 8;                     // elements per access
constexpr int kUnroll = 2;               // loads in flight per thread
constexpr bool kBackward = false;          // direction of the second read
constexpr kgen::Cache kLoad = kgen::Cache::evict_last;
constexpr kgen::Cache kReread = kgen::Cache::normal;
constexpr kgen::Cache kStore = kgen::Cache::evict_first;

constexpr bool kWeighted = kgen::kPresent<W>;
constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

// A tile is kUnroll vectors of every thread; the last one may be cut short.
constexpr int kTile = kUnroll * kThreads * kVec;
constexpr int kTiles = (kN + kTile - 1) / kTile;

using Vector = kgen::Vec<T, kVec>;

// Whether vector `u` of this thread's part of a tile lies in the row; known but for the last tile.
KGEN_DEVICE bool inside(int column) { return kN % kTile == 0 || column < kN; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,             // [M, N], rows x_stride_M apart
                const W* __restrict__ w,             // [N] or null
                const Added* __restrict__ residual,  // [M, N], rows residual_stride_M apart, or null
                T* __restrict__ y,                   // [M, N]
                Added* h,                            // [M, N] or null
                Saved* __restrict__ rstd,            // [M] or null
                kgen::i64 x_stride_M, kgen::i64 residual_stride_M, float eps, float offset) {
    using RowSum = kgen::GroupSum<kThreads, 1>;
    __shared__ typename RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    const kgen::i64 row = blockIdx.x;
    const T* x_row = x + row * x_stride_M;
    const Added* residual_row = residual + row * residual_stride_M;
    Added* h_row = h + row * kN;
    T* y_row = y + row * kN;
    const int first = static_cast<int>(threadIdx.x) * kVec;

    // 1. Sum of squares; one chain per vector in flight.
    float sum[kUnroll] = {};
    for (int tile = 0; tile < kTiles; ++tile) {
        Vector held[kUnroll];
        kgen::Vec<Added, kVec> added[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * (kThreads * kVec) + first;
            held[u] = inside(column) ? kgen::load_vec<kVec, kLoad>(x_row + column) : Vector{};
            added[u] = kgen::Vec<Added, kVec>{};
            if (kgen::kPresent<Added> && inside(column))
                added[u] = kgen::load_vec<kVec, kLoad>(residual_row + column);
        }
        if constexpr (kgen::kPresent<Added>) {  // normalise the sum, rounded as it is stored
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int column = tile * kTile + u * (kThreads * kVec) + first;
                held[u] = kgen::add(held[u], added[u]);
                if (inside(column))
                    kgen::store_vec(h_row + column, kgen::as<Added>(held[u]));
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

    if constexpr (kgen::kPresent<Saved>) {
        if (threadIdx.x == 0) rstd[row] = scale;
    }

    // 2. Read again (what this very thread wrote to h, if there is a residual), scale, write.
    const T* again = kgen::kPresent<Added> ? reinterpret_cast<const T*>(h_row) : x_row;
    for (int step = 0; step < kTiles; ++step) {
        const int tile = kBackward ? kTiles - 1 - step : step;
        Vector held[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const int column = tile * kTile + u * (kThreads * kVec) + first;
            held[u] = inside(column) ? kgen::load_vec<kVec, kReread>(again + column) : Vector{};
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
