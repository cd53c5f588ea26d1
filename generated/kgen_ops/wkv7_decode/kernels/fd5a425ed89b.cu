// digest: fd5a425ed89b
// Rendered by kgen from templates/wkv7_decode/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=fp32, w_dtype=fp32, decay_form=log
// wkv7, decoding: one thread per column of a state, which stays in the pool. Any shape.
#include "kgen/wkv/state_pool.cuh"
#include "kgen/wkv7/naive.cuh"

namespace {

using Value = float;
using W = float;
using kgen::i64;
using kgen::wkv7::Rows;

constexpr auto kForm = kgen::wkv7::DecayForm::log;  // of w
constexpr int kThreads = 64;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv7_decode(const Value* __restrict__ r,             // [B, T, H, K]
            const W* __restrict__ w,                 // [B, T, H, K]
            const Value* __restrict__ k,             // [B, T, H, K]
            const Value* __restrict__ v,             // [B, T, H, V]
            const Value* __restrict__ a,             // [B, T, H, K]
            const Value* __restrict__ b,             // [B, T, H, K]
            float* __restrict__ state_pool,          // [S, H, K, V], updated
            const void* __restrict__ state_indices,  // [B] or null
            Value* __restrict__ y,                   // [B, T, H, V]
            i64 state_indices_itemsize, i64 B, i64 S, i64 T, i64 H, i64 K, i64 V, i64 r_stride_B,
            i64 r_stride_T, i64 r_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
            i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
            i64 v_stride_H, i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B,
            i64 b_stride_T, i64 b_stride_H, i64 state_pool_stride_S, i64 state_pool_stride_H,
            i64 state_pool_stride_K, i64 state_pool_stride_V, i64 y_stride_B, i64 y_stride_T,
            i64 y_stride_H, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [B, H, V]
    if (column >= B * H * V) return;
    const i64 n = column / V / H, h = column / V % H, m = column % V;
    const auto y_h = Rows<Value>{y, y_stride_B, y_stride_T, y_stride_H}.head(n, h);

    // 1. The slot.
    const auto slot = kgen::wkv::slot_of(state_indices, state_indices_itemsize, n, S);
    if (!slot.used) {
        for (i64 t = 0; t < T; ++t) y_h.at(t)[m] = kgen::from_float<Value>(slot.y);
        return;
    }

    // 2. Step by step: the new state, then the output.
    const auto r_h = Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}.head(n, h);
    const auto w_h = Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}.head(n, h);
    const auto k_h = Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}.head(n, h);
    const auto v_h = Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}.head(n, h);
    const auto a_h = Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}.head(n, h);
    const auto b_h = Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}.head(n, h);
    const kgen::wkv::StatePool pool{state_pool, state_pool_stride_S, state_pool_stride_H,
                                    state_pool_stride_K, state_pool_stride_V};
    const auto states = pool.head(slot.place, h);
    const kgen::wkv7::ColumnInMemory state{states.at(0, m), states.stride_k, K};
    for (i64 t = 0; t < T; ++t) {
        const float sa = state.read(a_h.at(t));
        state.update<kForm>(w_h.at(t), b_h.at(t), sa, k_h.at(t), v_h(t, m));
        y_h.at(t)[m] = kgen::from_float<Value>(scale * state.read(r_h.at(t)));
    }
}

KGEN_EXPORT(wkv7_decode);
