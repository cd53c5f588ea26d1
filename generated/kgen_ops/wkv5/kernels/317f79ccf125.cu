// digest: 317f79ccf125
// Rendered by kgen from templates/wkv5/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=fp16, w_dtype=fp16, u_dtype=fp16, decay_form=raw
// wkv5 forward, a column of the state per thread, the state in global memory. Any shape.
#include "kgen/wkv.cuh"

namespace {

using Value = kgen::fp16;
using W = kgen::fp16;
using U = kgen::fp16;
using kgen::i64;

constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
constexpr int kThreads = 64;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv5_forward(const Value* __restrict__ r,              // [B, T, H, K]
             const Value* __restrict__ k,              // [B, T, H, K]
             const Value* __restrict__ v,              // [B, T, H, V]
             const W* __restrict__ w,                  // [H, K]
             const U* __restrict__ u,                  // [H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const void* __restrict__ cu_seqlens,      // [N + 1] or null
             Value* __restrict__ y,                    // [B, T, H, V]
             float* __restrict__ final_state,          // [N, H, K, V] or null
             float* __restrict__ states,               // [N, H, K, V]
             i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 r_stride_B,
             i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
             i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 y_stride_B, i64 y_stride_T,
             i64 y_stride_H, float scale) {
    kgen::wkv::forward_in_memory<kThreads, kForm, Value, W, U>(
        {N, T, H, K, V}, {cu_seqlens, cu_seqlens_itemsize}, {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
        kgen::wkv::of_every_step(w, K), u, initial_state,
        {y, y_stride_B, y_stride_T, y_stride_H}, final_state, states, scale);
}

KGEN_EXPORT(wkv5_forward);
