// digest: f5ab9d2fef10
// Rendered by kgen from templates/wkv5/forward_block_per_head.cu.jinja
// config: block_per_head(split=4, tile=4, columns=64, tokens=1, stages=1, vec=2)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=fp32, final_state_dtype=fp32, cu_seqlens_dtype=none, decay_form=log
// wkv5 forward, a block per head and slice of values: the state stays in registers while the block
// walks over time; r, k, v and w come through shared memory, several steps per barrier.
#include "kgen/wkv_tiles.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;

constexpr int kK = 64;
constexpr int kV = 64;

struct Config {
    using Value = ::Value;
    using W = ::W;
    using U = ::U;
    static constexpr bool kPerStep = false;    // whether w has steps
    static constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
    static constexpr int kSplit = 4;      // threads that share a column of the state
    static constexpr int kTile = 4;        // columns of a thread
    static constexpr int kColumns = 64;  // columns of a block
    static constexpr int kTokens = 1;    // steps per barrier
    static constexpr int kStages = 1;    // batches of steps in shared memory
    static constexpr int kVec = 2;          // elements per copy
};

constexpr bool kInitialState = kgen::kPresent<float>;
constexpr bool kFinalState = kgen::kPresent<float>;
constexpr int kThreads = Config::kColumns / Config::kTile * Config::kSplit;

static_assert(kK % Config::kVec == 0 && kV % Config::kVec == 0, "copies must end with a row");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv5_forward(const Value* __restrict__ r,              // [B, T, H, K]
             const Value* __restrict__ k,              // [B, T, H, K]
             const Value* __restrict__ v,              // [B, T, H, V]
             const W* __restrict__ w,                  // [H, K]
             const U* __restrict__ u,                  // [H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
             Value* __restrict__ y,                    // [B, T, H, V]
             float* __restrict__ final_state,          // [N, H, K, V] or null
             i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
             i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
             i64 y_stride_B, i64 y_stride_T, i64 y_stride_H,
             float scale) {
    kgen::wkv::forward_by_head<Config, kK, kV, Value, W, U>(
        T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H}, kgen::wkv::of_every_step(w, kK), u,
        kInitialState ? initial_state : nullptr, {y, y_stride_B, y_stride_T, y_stride_H},
        kFinalState ? final_state : nullptr, scale);
}

KGEN_EXPORT(wkv5_forward);
