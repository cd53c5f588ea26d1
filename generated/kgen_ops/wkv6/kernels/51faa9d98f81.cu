// digest: 51faa9d98f81
// Rendered by kgen from templates/wkv/forward_chunk_halving.cu.jinja
// config: chunk_halving(copy_bytes=16, min_blocks=2, chunk=16, value_tiles=1, value_warps=4, key_warps=1, stages=5, buffers=2, lane_keys=2, segments=1)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, u_dtype=bf16, initial_state_dtype=fp32, final_state_dtype=fp32, cu_seqlens_dtype=none, decay_form=log
// wkv5 and wkv6 forward on tensor cores, in a time that does not depend on the decays: a block loops over the chunks of
// one head, or of one segment of its steps, with kBlockV value features of the state in registers.
//
//     wkv_segment_states  what each segment but the last adds to the state, and the segment's product of decays
//     wkv_forward         y; the state before a segment comes from the segments before it
//
// Shared memory and barriers: kgen/chunked/chunk_halving.cuh; decays within a chunk: kgen/chunked/halving_decay.cuh.
#include "kgen/chunked/chunk_halving.cuh"
#include "kgen/wkv/chunked_forward.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kK = 64;
constexpr int kV = 64;
constexpr int kChunk = 16;             // steps
constexpr int kValueTiles = 1;  // fragments of 16 value features per warp
constexpr int kValueWarps = 4;  // warps side by side along the value features
constexpr int kKeyWarps = 1;      // warps that split the keys of these features
constexpr int kStages = 5;           // chunks in shared memory
constexpr int kBuffers = 2;         // for rows with decays
constexpr int kLaneKeys = 2;      // keys whose decays a lane holds: 1 in 16 steps, or 2 in 4 steps
constexpr int kCopyBytes = 16;    // bytes of one asynchronous copy
constexpr int kSegments = 1;       // parts of T, one block each
constexpr int kMinBlocks = 2;    // blocks per SM that registers leave room for

// Products are as accurate as fp32 if the final state is returned.
constexpr bool kReturned = kgen::kPresent<float>;
using Decay = kgen::HalvingRows<W, U, kForm, kBuffers, true, kLaneKeys == 2>;
using Loop = kgen::HalvingLoop<Value, kReturned, kK, kV, kChunk, kValueTiles, kValueWarps, kKeyWarps,
                               kStages, kCopyBytes, Decay>;
using Forward =
    kgen::wkv::ChunkedForward<Loop, Value, W, U, Offset, kK, kV, kChunk, kSegments>;

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
wkv_segment_states(const Value* __restrict__ k,         // [B, T, H, K]
                   const Value* __restrict__ v,         // [B, T, H, V]
                   const W* __restrict__ w,             // [B, T, H, K], or [H, K]
                   float* __restrict__ segment_states,  // [B * H, segments - 1, K, V]
                   float* __restrict__ segment_decays,  // [B * H, segments - 1, K]
                   i64 H, i64 T, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
                   i64 v_stride_T,
                   i64 v_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H) {
    Forward::sum_segment(H, T, {k, k_stride_B, k_stride_T, k_stride_H},
                         {v, v_stride_B, v_stride_T, v_stride_H},
                         {w, w_stride_B, w_stride_T, w_stride_H},
                         segment_states, segment_decays);
}

KGEN_EXPORT(wkv_segment_states);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
wkv_forward(const Value* __restrict__ r,               // [B, T, H, K]
            const Value* __restrict__ k,               // [B, T, H, K]
            const Value* __restrict__ v,               // [B, T, H, V]
            const W* __restrict__ w,                   // [B, T, H, K], or [H, K]
            const U* __restrict__ u,                   // [H, K]
            const float* __restrict__ initial_state,   // [N, H, K, V] or null
            const Offset* __restrict__ cu_seqlens,     // [N + 1] or null
            const float* __restrict__ segment_states,  // [B * H, segments - 1, K, V]
            const float* __restrict__ segment_decays,  // [B * H, segments - 1, K]
            Value* __restrict__ y,                     // [B, T, H, V]
            float* __restrict__ final_state,           // [N, H, K, V] or null
            i64 H, i64 T, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
            i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
            i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
            i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    Forward::forward(H, T, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
                     {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
                     {w, w_stride_B, w_stride_T, w_stride_H},
                     u, initial_state, segment_states, segment_decays,
                     {y, y_stride_B, y_stride_T, y_stride_H}, final_state, scale);
}

KGEN_EXPORT(wkv_forward);
