// digest: 57d8710dbd5f
// Rendered by kgen from templates/timex/forward_register_tiles.cu.jinja
// config: register_tiles(threads=64, outputs=8, batch=1, balanced=true, min_blocks=8)
// problem: dtype=fp32, w_dtype=fp32
// timex forward by FMAs: a block has a channel and a group of batch rows in shared memory, a thread
// a tile of consecutive outputs of each of these rows.
#include "kgen/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 64;
constexpr int kOutputs = 8;         // consecutive, per thread and batch row
constexpr int kBatch = 1;             // batch rows of a block: the taps are read once for all
constexpr bool kBalanced = true;      // pair early outputs with late ones
constexpr int kMinBlocks = 8;    // blocks per SM that registers leave room for

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
timex_forward(const W* __restrict__ w,  // [C, T]
              const T* __restrict__ k,  // [B, C, T]
              T* __restrict__ out,      // [B, C, T]
              kgen::i64 B, kgen::i64 C, kgen::i64 columns, float eps) {
    kgen::toeplitz_tiles<kgen::Triangle::lower, T, W, kOutputs, kBatch, kBalanced, kThreads>(
        w, k, out, B, C, static_cast<int>(columns), eps);
}

KGEN_EXPORT(timex_forward);
