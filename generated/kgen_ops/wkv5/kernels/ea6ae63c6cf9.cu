// digest: ea6ae63c6cf9
// Rendered by kgen from templates/wkv5/backward_naive.cu.jinja
// config: naive(threads=64, chunk=64)
// problem: dtype=fp32, w_dtype=fp32, u_dtype=fp32, decay_form=raw
// wkv5 backward, a column of a state per thread, the states in global memory. Any shape.
// Nothing is added in an order that depends on timing.
#include "kgen/wkv.cuh"

namespace {

using Value = float;
using W = float;
using U = float;
using kgen::i64;

constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
constexpr int kThreads = 64;
constexpr int kChunk = 64;  // steps between two states that are kept

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv5_backward_v(const Value* __restrict__ gy,            // [B, T, H, V]
                const Value* __restrict__ r,             // [B, T, H, K]
                const Value* __restrict__ k,             // [B, T, H, K]
                const W* __restrict__ w,                 // [H, K]
                const U* __restrict__ u,                 // [H, K]
                const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
                const void* __restrict__ cu_seqlens,     // [N + 1] or null
                Value* __restrict__ gv,                  // [B, T, H, V]
                float* __restrict__ ginitial_state,      // [N, H, K, V] or null
                float* __restrict__ states,              // [N, H, K, V]
                i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 gy_stride_B,
                i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H,
                i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                i64 gv_stride_H, float scale) {
    kgen::wkv::backward_v_in_memory<kThreads, kForm, Value, W, U>(
        {N, T, H, K, V}, {cu_seqlens, cu_seqlens_itemsize},
        {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
        kgen::wkv::of_every_step(w, K), u, gfinal_state,
        {gv, gv_stride_B, gv_stride_T, gv_stride_H}, ginitial_state, states,
        scale);
}

KGEN_EXPORT(wkv5_backward_v);

extern "C" __global__ void __launch_bounds__(kThreads)
wkv5_backward_k(const Value* __restrict__ gy,             // [B, T, H, V]
                const Value* __restrict__ r,              // [B, T, H, K]
                const Value* __restrict__ k,              // [B, T, H, K]
                const Value* __restrict__ v,              // [B, T, H, V]
                const W* __restrict__ w,                  // [H, K]
                const U* __restrict__ u,                  // [H, K]
                const float* __restrict__ initial_state,  // [N, H, K, V] or null
                const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                const void* __restrict__ cu_seqlens,      // [N + 1] or null
                Value* __restrict__ gr,                   // [B, T, H, K]
                Value* __restrict__ gk,                   // [B, T, H, K]
                float* __restrict__ gw_parts,             // [N, H, K]
                float* __restrict__ gu_parts,             // [N, H, K]
                float* __restrict__ states,               // [N, H, V, K]
                float* __restrict__ gradients,            // [N, H, V, K]
                float* __restrict__ kept,                 // [B, H, chunks, V, K]
                float* __restrict__ chunk_states,         // [N, H, kChunk, V, K]
                i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 gy_stride_B,
                i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H,
                i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
                i64 v_stride_H, i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                i64 gk_stride_T, i64 gk_stride_H, float scale) {
    kgen::CompensatedSum gw;  // of the thread's key
    kgen::wkv::backward_k_in_memory<kThreads, kChunk, kForm, Value, W, U>(
        {N, T, H, K, V}, {cu_seqlens, cu_seqlens_itemsize},
        {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H}, kgen::wkv::of_every_step(w, K), u,
        initial_state, gfinal_state, {gr, gr_stride_B, gr_stride_T, gr_stride_H},
        {gk, gk_stride_B, gk_stride_T, gk_stride_H}, gu_parts, {states, gradients, kept,
         chunk_states},
        scale, [&](const kgen::wkv::Span&, i64, i64, i64, float value) { gw.add(value); });
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column < N * H * K) gw_parts[column] = gw.value();
}

KGEN_EXPORT(wkv5_backward_k);

// gw and gu, sums over the sequences.
extern "C" __global__ void __launch_bounds__(kThreads)
wkv5_backward_sums(const float* __restrict__ gw_parts,  // [N, H, K]
                   const float* __restrict__ gu_parts,  // [N, H, K]
                   W* __restrict__ gw,                  // [H, K]
                   U* __restrict__ gu,                  // [H, K]
                   i64 N, i64 H, i64 K) {
    kgen::wkv::sum_batch<kThreads>(gw_parts, N, H * K, gw);
    kgen::wkv::sum_batch<kThreads>(gu_parts, N, H * K, gu);
}

KGEN_EXPORT(wkv5_backward_sums);
