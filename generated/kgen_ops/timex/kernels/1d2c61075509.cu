// digest: 1d2c61075509
// Rendered by kgen from templates/timex/forward_toeplitz_mma.cu.jinja
// config: toeplitz_mma(warps=4, m_tiles=3, n_tiles=2, t_fold=1, promotions=1, t_blocks=1, min_blocks=3)
// problem: dtype=fp32, w_dtype=fp32
// timex forward on tensor cores: for each channel, a lower triangular Toeplitz matrix [T x T] times k [T x B]
// (toeplitz_mma.cuh). fp32 uses 3xfp16 with promoted partial sums; 16-bit dtypes are multiplied directly.
//
//     out[b, c, t] = eps + sum over u <= t of w[c, T - 1 - (t - u)] * k[b, c, u]
#include "kgen/toeplitz/toeplitz_mma.cuh"

namespace {

using T = float;
using W = float;

constexpr int kWarps = 4;
constexpr int kMTiles = 3;         // mma tiles of 16 outputs per warp
constexpr int kNTiles = 2;         // mma tiles of 8 columns: batch rows times kTFold
constexpr int kTFold = 1;           // tiles of outputs of one batch row that are columns
constexpr int kPromotions = 1;  // of partial sums to fp32, per 16 * kMTiles columns
constexpr bool kSkipZeros = false;  // leave out taps that are 0
constexpr int kTBlocks = 1;       // blocks that share the outputs of a channel
constexpr int kMinBlocks = 3;   // blocks per SM, of __launch_bounds__
constexpr bool kPromote = sizeof(T) == 4;   // add partial sums in fp32 registers

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * kgen::kWarpSize, kMinBlocks)
timex_forward(const W* __restrict__ w,  // [C, T]
              const T* __restrict__ k,  // [B, C, T]
              T* __restrict__ out,      // [B, C, T]
              kgen::i64 B, kgen::i64 C, kgen::i64 columns, float eps) {
    kgen::ToeplitzMma<kgen::Triangle::lower, T, W, kMTiles, kNTiles, kTFold, kPromotions, kPromote,
                      kWarps, kTBlocks, kSkipZeros> multiply;
    multiply(w, k, out, B, C, static_cast<int>(columns), eps);
}

KGEN_EXPORT(timex_forward);
