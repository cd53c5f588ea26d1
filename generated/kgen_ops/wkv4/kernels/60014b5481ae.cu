// digest: 60014b5481ae
// Rendered by kgen from templates/wkv4/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=bf16, w_dtype=fp32, u_dtype=bf16, decay_form=raw
// wkv4 forward, one thread per batch row and channel, step by step. Any shape.
#include "kgen/wkv4/pair.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using kgen::i64;

constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
constexpr int kThreads = 64;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv4_forward(const Value* __restrict__ k,              // [B, T, C]
             const Value* __restrict__ v,              // [B, T, C]
             const W* __restrict__ w,                  // [C]
             const U* __restrict__ u,                  // [C]
             const float* __restrict__ initial_state,  // [B, C, 3] or null
             Value* __restrict__ y,                    // [B, T, C]
             float* __restrict__ final_state,          // [B, C, 3] or null
             i64 B, i64 T, i64 C, i64 k_stride_B, i64 k_stride_T, i64 v_stride_B, i64 v_stride_T,
             i64 y_stride_B, i64 y_stride_T) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [B, C]
    if (column >= B * C) return;
    const i64 b = column / C, c = column % C;
    const float decay = kgen::wkv4::log_decay<kForm>(kgen::to_float(w[c]));
    const float bonus = kgen::to_float(u[c]);
    k += b * k_stride_B + c;
    v += b * v_stride_B + c;
    y += b * y_stride_B + c;

    auto state = kgen::wkv4::initial_pair<false>(initial_state, column);
    for (i64 t = 0; t < T; ++t) {
        const float k_t = kgen::to_float(k[t * k_stride_T]), v_t = kgen::to_float(v[t * v_stride_T]);
        const auto output = kgen::wkv4::output_of(state, bonus + k_t, v_t);
        y[t * y_stride_T] = kgen::from_float<Value>(output.y);
        kgen::wkv4::step(state, decay, k_t, v_t);
    }
    if (final_state) kgen::wkv4::store_state(final_state, column, state);
}

KGEN_EXPORT(wkv4_forward);
