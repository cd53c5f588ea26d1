// digest: f64943b4247c
// Rendered by kgen from templates/timex/backward_toeplitz_mma.cu.jinja
// config: toeplitz_mma(warps=1, m_tiles=4, n_tiles=1, t_fold=8, promotions=2, min_blocks=4, tap_diagonals=6, tap_k=16, tap_fold=16, tap_warps=4)
// problem: dtype=fp32, w_dtype=fp32
// timex backward on tensor cores.
//
//     gk[b, c, u] = sum over t >= u of w[c, T - 1 - (t - u)] * gout[b, c, t]
//     gw[c, T - 1 - d] = sum over b and t of gout[b, c, t] * k[b, c, t - d]
//
// gk: for each channel, an upper triangular Toeplitz matrix times gout (toeplitz_mma.cuh). gw: the product of gout
// and k over the batch, summed along its diagonals (tap_gradient_mma.cuh).
#include "kgen/toeplitz/tap_gradient_mma.cuh"
#include "kgen/toeplitz/toeplitz_mma.cuh"

namespace {

using T = float;
using W = float;

constexpr int kWarps = 1;                 // per block of gk
constexpr int kMTiles = 4;              // mma tiles of 16 outputs per warp
constexpr int kNTiles = 1;              // mma tiles of 8 columns: batch rows times kTFold
constexpr int kTFold = 8;                // tiles of outputs of a batch row in N
constexpr int kPromotions = 2;       // of partial sums, per 16 * kMTiles columns
constexpr bool kSkipZeros = false;       // leave out taps that are 0
constexpr bool kPromote = sizeof(T) == 4;        // add partial sums in fp32 registers
constexpr int kTapDiagonals = 6;  // gw: distances t - u, in steps of 8, per warp
constexpr int kTapK = 16;                  // gw: K of the products, batch rows times kTapFold
constexpr int kTapFold = 16;            // gw: tiles of 16 columns of one batch row along K
constexpr int kTapWarps = 4;          // per block of gw
constexpr int kMinBlocks = 4;        // blocks of gk per SM, of __launch_bounds__

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * kgen::kWarpSize, kMinBlocks)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* __restrict__ gk,          // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::ToeplitzMma<kgen::Triangle::upper, T, W, kMTiles, kNTiles, kTFold, kPromotions, kPromote,
                      kWarps, 1, kSkipZeros> multiply;
    multiply(w, gout, gk, B, C, static_cast<int>(columns), 0.0f);
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kTapWarps * kgen::kWarpSize, 1)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* __restrict__ gw,          // [C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::TapGradientMma<T, W, kTapDiagonals, kTapK, kTapFold, kTapWarps> sum;
    sum(gout, k, gw, B, C, static_cast<int>(columns));
}

KGEN_EXPORT(timex_backward_w);
