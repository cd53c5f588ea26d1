// digest: 417694357e5e
// Rendered by kgen from templates/timex/backward_register_tiles.cu.jinja
// config: register_tiles(threads=128, outputs=8, batch=1, balanced=true, taps=8, tap_threads=128)
// problem: dtype=fp32, w_dtype=fp32
// timex backward by FMAs. gk: as the forward pass, with the other triangle. gw: a block has a
// channel, a thread a tile of consecutive taps, summed over the batch rows one after the other.
#include "kgen/toeplitz.cuh"

namespace {

using T = float;
using W = float;

constexpr int kThreads = 128;
constexpr int kOutputs = 8;         // consecutive values of gk, per thread and batch row
constexpr int kBatch = 1;             // batch rows of a block of gk
constexpr bool kBalanced = true;      // pair early outputs with late ones
constexpr int kTaps = 8;               // consecutive values of gw per thread
constexpr int kTapThreads = 128;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
timex_backward_k(const T* __restrict__ gout,  // [B, C, T]
                 const W* __restrict__ w,     // [C, T]
                 T* __restrict__ gk,          // [B, C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::toeplitz_tiles<kgen::Triangle::upper, T, W, kOutputs, kBatch, kBalanced, kThreads>(
        w, gout, gk, B, C, static_cast<int>(columns), 0.0f);
}

KGEN_EXPORT(timex_backward_k);

extern "C" __global__ void __launch_bounds__(kTapThreads, 1)
timex_backward_w(const T* __restrict__ gout,  // [B, C, T]
                 const T* __restrict__ k,     // [B, C, T]
                 W* __restrict__ gw,          // [C, T]
                 kgen::i64 B, kgen::i64 C, kgen::i64 columns) {
    kgen::tap_gradient_tiles<T, W, kTaps, kBalanced, kTapThreads>(gout, k, gw, B, C,
                                                                  static_cast<int>(columns));
}

KGEN_EXPORT(timex_backward_w);
