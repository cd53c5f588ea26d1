// Rendered by kgen from templates/rmsnorm/forward_long_rows.cu.jinja
// config: long_rows(threads=1024, vec=8, unroll=4, store_cache=streaming)
// problem: dtype=bf16, w_dtype=bf16
// RMSNorm forward, a block per row, for rows too long to be held: two reads, `kUnroll` vectors in
// flight per thread. The second read walks backwards, from what L1 and L2 saw last.
#include "kgen/block.cuh"
#include "kgen/math.cuh"
#include "kgen/memory.cuh"

namespace {

using T = kgen::bf16;
using W = kgen::bf16;

constexpr int kThreads = 1024;
constexpr int kVec = 8;                     // elements per access
constexpr int kUnroll = 4;               // loads in flight per thread
constexpr kgen::Cache kStore = kgen::Cache::streaming;

constexpr int kWeightBytes = kVec * static_cast<int>(sizeof(W));
constexpr int kWeightParts = kWeightBytes > 16 ? kWeightBytes / 16 : 1;  // accesses per vector
constexpr int kWeightVec = kVec / kWeightParts;

static_assert(kVec * sizeof(T) <= 16, "one access moves at most 16 bytes");
static_assert(kgen::is_power_of_two(kThreads) && kThreads >= 32 && kThreads <= 1024,
              "a block is 32 to 1024 threads, a power of two");

using Vector = kgen::Vec<T, kVec>;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
rmsnorm_forward(const T* __restrict__ x,  // [M, N], rows x_stride_M apart
                const W* __restrict__ w,  // [N]
                T* __restrict__ y,        // [M, N]
                kgen::i64 M, kgen::i64 N, kgen::i64 x_stride_M, float eps) {
    using RowSum = kgen::GroupSum<kThreads, 1>;
    __shared__ typename RowSum::Scratch scratch;
    RowSum row_sum(scratch);

    const kgen::i64 row = blockIdx.x;
    const T* x_row = x + row * x_stride_M;
    T* y_row = y + row * N;

    // A tile is kUnroll vectors of every thread; the last one may be cut short.
    constexpr int kTile = kUnroll * kThreads * kVec;
    const kgen::i64 tiles = kgen::ceil_div(N, static_cast<kgen::i64>(kTile));
    const int first = static_cast<int>(threadIdx.x) * kVec;

    // 1. Sum of squares; one chain per vector in flight.
    float sum[kUnroll] = {};
    for (kgen::i64 tile = 0; tile < tiles; ++tile) {
        Vector held[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const kgen::i64 column = tile * kTile + u * (kThreads * kVec) + first;
            held[u] = column < N ? kgen::load_vec<kVec>(x_row + column) : Vector{};
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
    const float scale = kgen::rsqrt(row_sum(squares) / static_cast<float>(N) + eps);

    // 2. Read again from the end, scale, write.
    for (kgen::i64 tile = tiles - 1; tile >= 0; --tile) {
        Vector held[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const kgen::i64 column = tile * kTile + u * (kThreads * kVec) + first;
            held[u] = column < N ? kgen::load_vec<kVec>(x_row + column) : Vector{};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
            const kgen::i64 column = tile * kTile + u * (kThreads * kVec) + first;
            if (column >= N) continue;
            float values[kVec];
            kgen::to_floats(held[u], values);
#pragma unroll
            for (int part = 0; part < kWeightParts; ++part) {
                float factors[kWeightVec];
                kgen::to_floats(kgen::load_vec<kWeightVec>(w + column + part * kWeightVec), factors);
#pragma unroll
                for (int i = 0; i < kWeightVec; ++i) {
                    float& value = values[part * kWeightVec + i];
                    value = value * scale * factors[i];
                }
            }
            kgen::store_vec<kStore>(y_row + column, kgen::from_floats<T>(values));
        }
    }
}

KGEN_EXPORT(rmsnorm_forward);
