// digest: 866d306e6c84
// Rendered by kgen from templates/timex/backward_toeplitz_mma.cu.jinja
// config: toeplitz_mma(warps=4, tiles=8, batch_tiles=1, fold=4, chains=2, min_blocks=1, tap_group=8, tap_batch=32, tap_fold=16, tap_warps=4)
// problem: dtype=fp32, w_dtype=fp32
// timex backward on tensor cores. gk: per channel, an upper triangular Toeplitz matrix times the
// batch's rows of gout. gw: the product of gout and k over the batch, summed along its diagonals.
#include "kgen/tap_gradient_mma.cuh"
#include "kgen/toeplitz_mma.cuh"

namespace {

using T = float;
using W = float;

constexpr int kWarps = 4;           // per block of gk
constexpr int kTiles = 8;           // fragments of 16 outputs per warp
constexpr int kColumns = 1;   // tiles of 8 columns per block of gk: batch rows ...
constexpr int kFold = 4;             // ... times neighbouring tiles of outputs
constexpr int kChains = 2;         // per 16 * kTiles columns, see kPromote
constexpr bool kPromote = sizeof(T) == 4;  // add chains of products outside of the tensor cores
constexpr int kGroup = 8;       // distances, in steps of 8, that a warp sums at once
constexpr int kBatch = 32;       // rows that a block of gw sums over at once: batch rows ...
constexpr int kTapFold = 16;      // ... times neighbouring tiles of 16 columns
constexpr int kTapWarps = 4;    // per block of gw
constexpr int kMinBlocks = 1;  // blocks of gk per SM that registers leave room for

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * kgen::kWarpSize, kMinBlocks)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* __restrict__ gk,          // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::ToeplitzMma<kgen::Triangle::upper, T, W, kTiles, kColumns, kFold, kChains, kPromote,
                      kWarps, 1> multiply;
    multiply(w, gout, gk, B, C, static_cast<int>(columns), 0.0f);
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kTapWarps * kgen::kWarpSize, 1)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* __restrict__ gw,          // [C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::TapGradientMma<T, W, kGroup, kBatch, kTapFold, kTapWarps> sum;
    sum(gout, k, gw, B, C, static_cast<int>(columns));
}

KGEN_EXPORT(timex_backward_w);
