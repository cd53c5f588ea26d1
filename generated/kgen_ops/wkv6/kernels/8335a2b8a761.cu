// digest: 8335a2b8a761
// Rendered by kgen from templates/wkv6/backward_block_per_head.cu.jinja
// config: block_per_head(split=4, tile=2, columns=64, tokens=8, stages=2, vec=4, keep=16, key_split=16, keys=16)
// problem: K=100, V=72, dtype=fp32, w_dtype=fp32, u_dtype=fp32, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv6 backward, states in registers. A block per head and slice of columns walks over time for gr
// and keeps a state every few steps, or for gv; a second kernel takes gk, gw and gu from those.
// Nothing is added in an order that depends on timing.
#include "kgen/wkv_gradients.cuh"

namespace {

using Value = float;
using W = float;
using U = float;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;

constexpr int kK = 100;
constexpr int kV = 72;

struct Config {
    using Value = ::Value;
    using W = ::W;
    using U = ::U;
    static constexpr bool kPerStep = true;     // whether w has steps
    static constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
    static constexpr int kSplit = 4;      // threads that share a column of the state
    static constexpr int kTile = 2;        // columns of a thread
    static constexpr int kColumns = 64;  // columns of a block
    static constexpr int kTokens = 8;    // steps per barrier
    static constexpr int kStages = 2;    // batches of steps in shared memory
    static constexpr int kVec = 4;          // elements per copy
    static constexpr int kKeep = 16;            // steps between two kept states
    static constexpr int kKeySplit = 16;  // threads that share a key of the second kernel
    static constexpr int kKeys = 16;            // keys of a block of it
};

constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr int kThreads = Config::kColumns / Config::kTile * Config::kSplit;
constexpr int kKeyThreads = Config::kKeys * Config::kKeySplit;
constexpr int kSumThreads = 128;

static_assert(kK % Config::kVec == 0 && kV % Config::kVec == 0, "copies must end with a row");

}  // namespace

// gr with the kept states, gv with the gradient of the initial state.
extern "C" __global__ void __launch_bounds__(kThreads)
wkv6_backward(const Value* __restrict__ gy,             // [B, T, H, V]
              const Value* __restrict__ r,              // [B, T, H, K]
              const Value* __restrict__ k,              // [B, T, H, K]
              const Value* __restrict__ v,              // [B, T, H, V]
              const W* __restrict__ w,                  // [B, T, H, K]
              const U* __restrict__ u,                  // [H, K]
              const float* __restrict__ initial_state,  // [N, H, K, V] or null
              const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
              const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
              Value* __restrict__ gr,                   // [B, T, H, K]
              Value* __restrict__ gv,                   // [B, T, H, V]
              float* __restrict__ ginitial_state,       // [N, H, K, V] or null
              float* __restrict__ kept,                 // [B, H, states, V, K]
              i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
              i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
              i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 w_stride_B, i64 w_stride_T,
              i64 w_stride_H, i64 gr_stride_B,
              i64 gr_stride_T, i64 gr_stride_H, i64 gv_stride_B, i64 gv_stride_T, i64 gv_stride_H,
              float scale) {
    kgen::wkv::backward_by_head<Config, kK, kV, Value, W, U>(
        T, H, cu_seqlens, {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
        {w, w_stride_B, w_stride_T, w_stride_H}, u, kInitialState ? initial_state : nullptr,
        kFinalState ? gfinal_state : nullptr, {gr, gr_stride_B, gr_stride_T, gr_stride_H},
        {gv, gv_stride_B, gv_stride_T, gv_stride_H}, kInitialState ? ginitial_state : nullptr,
        kept, scale);
}

KGEN_EXPORT(wkv6_backward);

extern "C" __global__ void __launch_bounds__(kKeyThreads)
wkv6_backward_keys(const Value* __restrict__ gy,             // [B, T, H, V]
                   const Value* __restrict__ r,              // [B, T, H, K]
                   const Value* __restrict__ k,              // [B, T, H, K]
                   const Value* __restrict__ v,              // [B, T, H, V]
                   const W* __restrict__ w,                  // [B, T, H, K]
                   const U* __restrict__ u,                  // [H, K]
                   const float* __restrict__ initial_state,  // [N, H, K, V] or null
                   const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                   const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
                   const float* __restrict__ kept,           // [B, H, states, V, K]
                   Value* __restrict__ gk,                   // [B, T, H, K]
                   W* __restrict__ gw,                       // [B, T, H, K]
                   float* __restrict__ gu_parts,             // [N, H, K]
                   i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                   i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
                   i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
                   i64 v_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                   i64 gk_stride_B, i64 gk_stride_T,
                   i64 gk_stride_H, i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H,
                   float scale) {
    kgen::wkv::key_gradients<Config, kK, kV, Value, W, U>(
        T, H, cu_seqlens, {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
        {w, w_stride_B, w_stride_T, w_stride_H}, u, kInitialState ? initial_state : nullptr,
        kFinalState ? gfinal_state : nullptr, kept, {gk, gk_stride_B, gk_stride_T, gk_stride_H},
        gu_parts, scale,
        [&](const kgen::wkv::Span& span, i64 t, i64 h, int key, float value, bool writes) {
            if (writes)
                gw[span.b * gw_stride_B + (span.first + t) * gw_stride_T + h * gw_stride_H + key] =
                    kgen::from_float<W>(value);
        });
}

KGEN_EXPORT(wkv6_backward_keys);

// gu, a sum over the sequences.
extern "C" __global__ void __launch_bounds__(kSumThreads)
wkv6_backward_sums(const float* __restrict__ gu_parts,  // [N, H, K]
                   U* __restrict__ gu,                  // [H, K]
                   i64 N, i64 H) {
    kgen::wkv::sum_batch<kSumThreads>(gu_parts, N, H * kK, gu);
}

KGEN_EXPORT(wkv6_backward_sums);
