// digest: fd0351d5a5db
// Rendered by kgen from templates/wkv_decode/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=fp16, w_dtype=fp16, u_dtype=fp32, decay_form=log
// wkv5 and wkv6, decoding: one thread per column of a state, which stays in the pool. Any shape.
#include "kgen/wkv/naive.cuh"
#include "kgen/wkv/state_pool.cuh"

namespace {

using Value = kgen::fp16;
using W = kgen::fp16;
using U = float;
using kgen::i64;
using kgen::wkv::Rows;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kThreads = 64;

// One thread computes a column of a head's state, step by step.
KGEN_DEVICE void decode(i64 B, i64 S, i64 T, i64 H, i64 K, i64 V, const Rows<const Value>& r,
                        const Rows<const Value>& k, const Rows<const Value>& v,
                        const Rows<const W>& w, const U* u, const kgen::wkv::StatePool& pool,
                        const void* indices, i64 indices_itemsize, const Rows<Value>& y,
                        float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [B, H, V]
    if (column >= B * H * V) return;
    const i64 n = column / V / H, h = column / V % H, m = column % V;
    const auto y_h = y.head(n, h);

    // 1. The slot.
    const auto slot = kgen::wkv::slot_of(indices, indices_itemsize, n, S);
    if (!slot.used) {
        for (i64 t = 0; t < T; ++t) y_h.at(t)[m] = kgen::from_float<Value>(slot.y);
        return;
    }

    // 2. Step by step: the output, then the new state.
    const auto states = pool.head(slot.place, h);
    const auto r_h = r.head(n, h), k_h = k.head(n, h), v_h = v.head(n, h);
    kgen::run_in_memory<kgen::Direction::forward>(
        states.at(0, m), states.stride_k, K, T, r_h.first, r_h.stride_t, k_h.first, k_h.stride_t,
        [&](i64 t) { return v_h(t, m); },
        [&](i64 t, float read) {
            const float bonus = kgen::wkv::bonus_of(r_h.at(t), u + h * K, k_h.at(t), K);
            y_h.at(t)[m] = kgen::from_float<Value>(scale * kgen::fma(bonus, v_h(t, m), read));
        },
        kgen::wkv::RowDecay<kForm, W>{w.head(n, h)});
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_decode(const Value* __restrict__ r,             // [B, T, H, K]
           const Value* __restrict__ k,             // [B, T, H, K]
           const Value* __restrict__ v,             // [B, T, H, V]
           const W* __restrict__ w,                 // [B, T, H, K], or [H, K]
           const U* __restrict__ u,                 // [H, K]
           float* __restrict__ state_pool,          // [S, H, K, V], updated
           const void* __restrict__ state_indices,  // [B] or null
           Value* __restrict__ y,                   // [B, T, H, V]
           i64 state_indices_itemsize, i64 B, i64 S, i64 T, i64 H, i64 K, i64 V, i64 r_stride_B,
           i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
           i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
           i64 state_pool_stride_S, i64 state_pool_stride_H, i64 state_pool_stride_K,
           i64 state_pool_stride_V, i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    decode(B, S, T, H, K, V, {r, r_stride_B, r_stride_T, r_stride_H},
           {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
           kgen::wkv::same_at_every_step(w, K),
           u,
           {state_pool, state_pool_stride_S, state_pool_stride_H, state_pool_stride_K,
            state_pool_stride_V},
           state_indices, state_indices_itemsize, {y, y_stride_B, y_stride_T, y_stride_H}, scale);
}

KGEN_EXPORT(wkv_decode);
