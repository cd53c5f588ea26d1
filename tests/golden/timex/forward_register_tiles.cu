// Rendered by kgen from templates/timex/forward_register_tiles.cu.jinja
// config: register_tiles(threads=32, outputs=1, batch=1, balanced=true, min_blocks=4)
// problem: dtype=fp32, w_dtype=fp32
// timex forward by FMAs from shared memory, a register tile per thread.
//
//     out[b, c, t] = eps + sum over u <= t of w[c, T - 1 - (t - u)] * k[b, c, u]
//
// A block stages one channel of kBatch batch rows; a thread computes kOutputs consecutive outputs of each of
// them (toeplitz_tiles in toeplitz.cuh).
#include "kgen/toeplitz/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 32;
constexpr int kOutputs = 1;         // consecutive, per thread and batch row
constexpr int kBatch = 1;             // batch rows of a block, which share the loads of taps
constexpr bool kBalanced = true;      // pair early and late outputs: equal work
constexpr int kMinBlocks = 4;    // blocks per SM, of __launch_bounds__

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
