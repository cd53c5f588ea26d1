// digest: 48f4bb0b04dd
// Rendered by kgen from templates/wkv7/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=fp16, w_dtype=fp32, decay_form=log
// wkv7 forward, one thread per column of the state, the state in global memory. Any shape.
#include "kgen/wkv7/naive.cuh"

namespace {

using Value = kgen::fp16;
using W = float;
using kgen::i64;
using kgen::wkv7::Rows;

constexpr auto kForm = kgen::wkv7::DecayForm::log;  // of w
constexpr int kThreads = 64;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv7_forward(const Value* __restrict__ r,              // [B, T, H, K]
             const W* __restrict__ w,                  // [B, T, H, K]
             const Value* __restrict__ k,              // [B, T, H, K]
             const Value* __restrict__ v,              // [B, T, H, V]
             const Value* __restrict__ a,              // [B, T, H, K]
             const Value* __restrict__ b,              // [B, T, H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const void* __restrict__ cu_seqlens,      // [N + 1] or null
             Value* __restrict__ y,                    // [B, T, H, V]
             float* __restrict__ final_state,          // [N, H, K, V] or null
             float* __restrict__ states,               // [N, H, K, V]
             i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 r_stride_B,
             i64 r_stride_T, i64 r_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
             i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
             i64 v_stride_H, i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B,
             i64 b_stride_T, i64 b_stride_H, i64 y_stride_B, i64 y_stride_T, i64 y_stride_H,
             float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [N, H, V]
    if (column >= N * H * V) return;
    const i64 head = column / V, m = column % V, h = head % H, first = head * K * V + m;
    const auto span = kgen::wkv::span_of(cu_seqlens, cu_seqlens_itemsize, head / H, T);
    const auto r_h = Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}.head(span, h);
    const auto w_h = Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}.head(span, h);
    const auto k_h = Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}.head(span, h);
    const auto v_h = Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}.head(span, h);
    const auto a_h = Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}.head(span, h);
    const auto b_h = Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}.head(span, h);
    const auto y_h = Rows<Value>{y, y_stride_B, y_stride_T, y_stride_H}.head(span, h);

    // 1. The state before the first step.
    const kgen::wkv7::ColumnInMemory state{states + first, V, K};
    state.load(initial_state ? initial_state + first : nullptr);

    // 2. Step by step: the new state, then the output.
    for (i64 t = 0; t < span.steps; ++t) {
        const float sa = state.read(a_h.at(t));
        state.update<kForm>(w_h.at(t), b_h.at(t), sa, k_h.at(t), v_h(t, m));
        y_h.at(t)[m] = kgen::from_float<Value>(scale * state.read(r_h.at(t)));
    }

    // 3. The state after the last step.
    state.store(final_state ? final_state + first : nullptr);
}

KGEN_EXPORT(wkv7_forward);
