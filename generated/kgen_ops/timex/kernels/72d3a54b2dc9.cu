// digest: 72d3a54b2dc9
// Rendered by kgen from templates/timex/forward_toeplitz_mma.cu.jinja
// config: toeplitz_mma(warps=2, tiles=4, batch_tiles=1, fold=4, chains=1, parts=1, min_blocks=4)
// problem: dtype=fp32, w_dtype=fp32
// timex forward on tensor cores: per channel, a lower triangular Toeplitz matrix [T x T] times the
// batch's rows [T x B]. fp32 as pairs of fp16 in short chains, 16 bits directly.
#include "kgen/toeplitz_mma.cuh"

namespace {

using T = float;
using W = float;

constexpr int kWarps = 2;
constexpr int kTiles = 4;           // fragments of 16 outputs per warp
constexpr int kColumns = 1;   // tiles of 8 columns per block: batch rows ...
constexpr int kFold = 4;             // ... times neighbouring tiles of outputs
constexpr int kChains = 1;         // per 16 * kTiles columns, see kPromote
constexpr int kParts = 1;           // blocks per channel and batch tile
constexpr int kMinBlocks = 4;  // blocks per SM that registers leave room for
constexpr bool kPromote = sizeof(T) == 4;  // add chains of products outside of the tensor cores

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * kgen::kWarpSize, kMinBlocks)
timex_forward(const W* __restrict__ w,  // [C, T]
              const T* __restrict__ k,  // [B, C, T]
              T* __restrict__ out,      // [B, C, T]
              kgen::i64 B, kgen::i64 C, kgen::i64 columns, float eps) {
    kgen::ToeplitzMma<kgen::Triangle::lower, T, W, kTiles, kColumns, kFold, kChains, kPromote,
                      kWarps, kParts> multiply;
    multiply(w, k, out, B, C, static_cast<int>(columns), eps);
}

KGEN_EXPORT(timex_forward);
