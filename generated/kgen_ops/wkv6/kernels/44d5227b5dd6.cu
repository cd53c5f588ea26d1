// digest: 44d5227b5dd6
// Rendered by kgen from templates/wkv6/forward_chunked.cu.jinja
// config: chunked(chunk=16, value_tiles=1, value_warps=2, key_warps=2, stages=3, copy=16, segments=8, min_blocks=2)
// problem: K=100, V=72, dtype=fp32, w_dtype=fp32, u_dtype=fp32, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv6 forward on tensor cores: a block walks the chunks of one head, or of a segment of it, with its
// slice of the state in registers. Rows get their decays in fp32. With segments, a first kernel
// sums each segment's outer products, and every segment starts from the sums of those before it.
#include "kgen/wkv_chunked.cuh"

namespace {

using T = float;
using W = float;
using U = float;
using Offset = kgen::none;  // none: a batch row is a sequence
using Product = kgen::wkv::ProductOf<T, kgen::none>::Type;
using kgen::i64;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kK = 100;
constexpr int kV = 72;
constexpr int kChunk = 16;             // steps
constexpr int kValueTiles = 1;  // fragments of 16 value features per warp
constexpr int kValueWarps = 2;  // warps side by side along the value features
constexpr int kKeyWarps = 2;      // warps that share these features' keys
constexpr int kStages = 3;           // chunks in shared memory
constexpr int kCopy = 16;               // bytes that one copy moves
constexpr int kSegments = 8;       // blocks in a row along the steps
constexpr int kMinBlocks = 2;    // blocks per SM that registers leave room for

using Walk = kgen::ChunkWalk<T, Product, kK, kV, kChunk, kValueTiles, kValueWarps, kKeyWarps,
                             kStages, kCopy, false, false, false, kgen::DecayRows<W, U, kForm>>;
using Extents = kgen::wkv::ChunkedExtents<kK, kV, kChunk, kSegments>;

}  // namespace

// Sums of k v^T over each segment but the last, and products of its decays.
extern "C" __global__ void __launch_bounds__(Walk::kThreads, kMinBlocks)
wkv6_segments(const T* __restrict__ k,   // [B, T, H, K]
              const T* __restrict__ v,   // [B, T, H, V]
              const W* __restrict__ w,   // [B, T, H, K]
              float* __restrict__ parts,   // [B * H, segments - 1, K, V]
              float* __restrict__ decays,  // [B * H, segments - 1, K]
              i64 H, i64 steps, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
              i64 v_stride_T, i64 v_stride_H, i64 w_stride_B, i64 w_stride_T,
              i64 w_stride_H) {
    kgen::wkv::sum_segment<Walk, Extents, T, W>(
        {}, H, steps, {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H}, {w, w_stride_B, w_stride_T, w_stride_H},
        parts, decays);
}

KGEN_EXPORT(wkv6_segments);

extern "C" __global__ void __launch_bounds__(Walk::kThreads, kMinBlocks)
wkv6_forward(const T* __restrict__ r,  // [B, T, H, K]
             const T* __restrict__ k,  // [B, T, H, K]
             const T* __restrict__ v,  // [B, T, H, V]
             const W* __restrict__ w,  // [B, T, H, K]
             const U* __restrict__ u,  // [H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
             const float* __restrict__ parts,          // [B * H, segments - 1, K, V]
             const float* __restrict__ decays,         // [B * H, segments - 1, K]
             T* __restrict__ y,                        // [B, T, H, V]
             float* __restrict__ final_state,          // [N, H, K, V] or null
             i64 H, i64 steps, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
             i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
             i64 w_stride_B, i64 w_stride_T, i64 w_stride_H, i64 y_stride_B, i64 y_stride_T,
             i64 y_stride_H, float scale) {
    kgen::wkv::walk_segment<Walk, Extents, T, W, U>(
        {}, H, steps, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
        {w, w_stride_B, w_stride_T, w_stride_H}, u, initial_state, parts, decays,
        {y, y_stride_B, y_stride_T, y_stride_H}, final_state, scale);
}

KGEN_EXPORT(wkv6_forward);
