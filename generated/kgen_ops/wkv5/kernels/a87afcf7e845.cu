// digest: a87afcf7e845
// Rendered by kgen from templates/wkv/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=bf16, w_dtype=bf16, u_dtype=bf16, decay_form=raw
// wkv5 and wkv6 forward, one thread per column of the state, the state in global memory. Any shape.
#include "kgen/wkv/naive.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = kgen::bf16;
using kgen::i64;
using kgen::wkv::Rows;

constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
constexpr int kThreads = 64;

// One thread computes a column of a head's state, step by step.
KGEN_DEVICE void forward(i64 N, i64 T, i64 H, i64 K, i64 V, const void* cu_seqlens,
                         i64 cu_seqlens_itemsize, Rows<const Value> r, Rows<const Value> k,
                         Rows<const Value> v, Rows<const W> w, const U* u,
                         const float* initial_state, Rows<Value> y, float* final_state,
                         float* states, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [N, H, V]
    if (column >= N * H * V) return;
    const i64 head = column / V, m = column % V, h = head % H;
    const auto span = kgen::wkv::span_of(cu_seqlens, cu_seqlens_itemsize, head / H, T);
    const i64 first = head * K * V + m;  // of the column, in a state
    float* state = states + first;

    // 1. The state before the first step.
    for (i64 i = 0; i < K; ++i)
        state[i * V] = initial_state ? initial_state[first + i * V] : 0.0f;

    // 2. Step by step: the output, then the new state.
    const auto r_h = r.head(span, h);
    const auto k_h = k.head(span, h);
    const auto v_h = v.head(span, h);
    const auto y_h = y.head(span, h);
    kgen::run_in_memory<kgen::Direction::forward>(
        state, V, K, span.steps, r_h.first, r_h.stride_t, k_h.first, k_h.stride_t,
        [&](i64 t) { return v_h(t, m); },
        [&](i64 t, float read) {
            const float bonus = kgen::wkv::bonus_of(r_h.at(t), u + h * K, k_h.at(t), K);
            y_h.at(t)[m] = kgen::from_float<Value>(scale * kgen::fma(bonus, v_h(t, m), read));
        },
        kgen::wkv::RowDecay<kForm, W>{w.head(span, h)});

    // 3. The state after the last step.
    if (final_state)
        for (i64 i = 0; i < K; ++i) final_state[first + i * V] = state[i * V];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_forward(const Value* __restrict__ r,              // [B, T, H, K]
            const Value* __restrict__ k,              // [B, T, H, K]
            const Value* __restrict__ v,              // [B, T, H, V]
            const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
            const U* __restrict__ u,                  // [H, K]
            const float* __restrict__ initial_state,  // [N, H, K, V] or null
            const void* __restrict__ cu_seqlens,      // [N + 1] or null
            Value* __restrict__ y,                    // [B, T, H, V]
            float* __restrict__ final_state,          // [N, H, K, V] or null
            float* __restrict__ states,               // [N, H, K, V]
            i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 r_stride_B,
            i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
            i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
            i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    forward(N, T, H, K, V, cu_seqlens, cu_seqlens_itemsize,
            {r, r_stride_B, r_stride_T, r_stride_H}, {k, k_stride_B, k_stride_T, k_stride_H},
            {v, v_stride_B, v_stride_T, v_stride_H},
            kgen::wkv::same_at_every_step(w, K),
            u, initial_state, {y, y_stride_B, y_stride_T, y_stride_H}, final_state, states, scale);
}

KGEN_EXPORT(wkv_forward);
