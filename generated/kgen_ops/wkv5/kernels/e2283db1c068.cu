// digest: e2283db1c068
// Rendered by kgen from templates/wkv5/backward_chunked.cu.jinja
// config: chunked(chunk=64, slice=64, stages=4, copy=16, min_blocks=1, carry=true, stagger=20)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv5 backward on tensor cores. Its w is wkv6's with a stride of 0 over time. A first kernel walks
// over time and keeps the states at the ends of chunks, those of the recurrence and their
// gradients; a second one finds the gradients of all chunks side by side; a third adds up gw and
// gu. Where heads are many, the second one has a block per head that walks back over its chunks and
// carries the state's gradient itself. Nothing is added in an order that depends on timing.
#include "kgen/wkv_backward_chunked.cuh"

namespace {

using T = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;

constexpr int kK = 64;
constexpr int kV = 64;
constexpr int kChunk = 64;           // steps between two states
constexpr int kSlice = 64;           // values of a block of the walk
constexpr int kStages = 4;         // batches of 32 steps in its shared memory
constexpr int kCopy = 16;             // bytes that one copy moves
constexpr int kMinBlocks = 1;  // blocks per SM that registers leave room for
constexpr bool kCarry = true;          // a block walks back over all chunks of its head
constexpr int kStagger = 20;       // thousands of cycles: see ChunkedBackward
constexpr bool kOverlap = false;      // a kernel may begin before the one before it has ended

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
// What is handed out in fp32 takes products as good as that.
constexpr bool kPrecise = sizeof(W) == 4 || kInitialState;
constexpr int kSumThreads = 512;

using Config = kgen::wkv::ChunkedBackward<T, W, kForm, false, kPrecise, kK, kV, kChunk,
                                          kSlice, kStages, kCopy, kCarry, kOverlap, kStagger>;
constexpr int kThreads = Config::kThreads;

}  // namespace

// The state before each chunk and, unless kCarry, the gradient of the one behind it, each
// [B * H, chunks, K / 16, V / 8, 32, 4] of padded K and V.
extern "C" __global__ void __launch_bounds__(kThreads)
wkv5_backward_states(const T* __restrict__ gy,                 // [B, T, H, V]
                     const T* __restrict__ r,                  // [B, T, H, K]
                     const T* __restrict__ k,                  // [B, T, H, K]
                     const T* __restrict__ v,                  // [B, T, H, V]
                     const W* __restrict__ w,                  // [H, K]
                     const float* __restrict__ initial_state,  // [B, H, K, V] or null
                     const float* __restrict__ gfinal_state,   // [B, H, K, V] or null
                     float* __restrict__ ginitial_state,       // [B, H, K, V] or null
                     float* __restrict__ states, float* __restrict__ gradients, i64 steps, i64 H,
                     i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
                     i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                     i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                     float scale) {
    kgen::wkv::keep_states<Config, T, W>(
        steps, H, {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H}, kgen::wkv::of_every_step(w, kK),
        kInitialState ? initial_state : nullptr, kFinalState ? gfinal_state : nullptr,
        kInitialState ? ginitial_state : nullptr, states, gradients, scale);
}

KGEN_EXPORT(wkv5_backward_states);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv5_backward(const T* __restrict__ gy,                // [B, T, H, V]
              const T* __restrict__ r,                 // [B, T, H, K]
              const T* __restrict__ k,                 // [B, T, H, K]
              const T* __restrict__ v,                 // [B, T, H, V]
              const W* __restrict__ w,                 // [H, K]
              const U* __restrict__ u,                 // [H, K]
              const float* __restrict__ gfinal_state,  // as above, if kCarry
              float* __restrict__ ginitial_state,      // as above, if kCarry
              const float* __restrict__ states,        // as above
              float* __restrict__ gradients,           // as above; if kCarry of one chunk per head
              T* __restrict__ gr,                      // [B, T, H, K]
              T* __restrict__ gk,                      // [B, T, H, K]
              T* __restrict__ gv,                      // [B, T, H, V]
              float* __restrict__ gw_parts,            // [B, H, chunks, K]
              float* __restrict__ gu_parts,            // [B, H, chunks, K]
              i64 steps, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
              i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
              i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 gr_stride_B, i64 gr_stride_T,
              i64 gr_stride_H, i64 gk_stride_B, i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B,
              i64 gv_stride_T, i64 gv_stride_H, float scale) {
    kgen::wkv::chunk_gradients<Config, T, W, U>(
        steps, H, {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H}, kgen::wkv::of_every_step(w, kK), u,
        states, gradients, kFinalState ? gfinal_state : nullptr,
        kInitialState ? ginitial_state : nullptr, {gr, gr_stride_B, gr_stride_T, gr_stride_H},
        {gk, gk_stride_B, gk_stride_T, gk_stride_H}, {gv, gv_stride_B, gv_stride_T, gv_stride_H},
        {}, gu_parts, gw_parts, scale);
}

KGEN_EXPORT(wkv5_backward);

// gw and gu, sums over batch and chunks, half of the blocks each.
extern "C" __global__ void __launch_bounds__(kSumThreads)
wkv5_backward_sums(const float* __restrict__ gw_parts,  // [B, H, chunks, K]
                   const float* __restrict__ gu_parts,  // [B, H, chunks, K]
                   W* __restrict__ gw,                  // [H, K]
                   U* __restrict__ gu,                  // [H, K]
                   i64 B, i64 H, i64 steps) {
    const i64 chunks = kgen::ceil_div(steps, i64{kChunk});
    const i64 half = gridDim.x / 2, block = blockIdx.x;
    if (block < half)
        kgen::wkv::sum_chunks<kSumThreads, kOverlap>(block, gw_parts, B, H, i64{kK}, chunks, gw);
    else
        kgen::wkv::sum_chunks<kSumThreads, kOverlap>(block - half, gu_parts, B, H, i64{kK}, chunks, gu);
}

KGEN_EXPORT(wkv5_backward_sums);
