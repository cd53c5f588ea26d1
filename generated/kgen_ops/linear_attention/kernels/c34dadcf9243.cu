// digest: c34dadcf9243
// Rendered by kgen from templates/linear_attention/backward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=fp16
// linear_attention backward, naive: a column of a state per thread, the state in global memory. Any shape; the kernels
// test at run time which tensors are given. No sum goes across threads, so the result is deterministic.
#include "kgen/recurrent/recurrence.cuh"

namespace {

using Value = kgen::fp16;
using kgen::i64;
using kgen::Direction;

constexpr int kThreads = 64;

// The factor of a step's gout, and scale times the gradient by the step's norm.
struct NormGradient {
    const float* norm;  // the head's steps, or null
    const float* gout_dot_out;
    float scale;

    KGEN_DEVICE float factor(i64 t) const { return norm ? scale / norm[t] : scale; }
    KGEN_DEVICE float of_norm(i64 t) const { return -scale * gout_dot_out[t] / norm[t]; }
};

}  // namespace

// gq: a loop forward in time with a column [M] of the transposed state.
extern "C" __global__ void __launch_bounds__(kThreads)
linear_attention_backward_q(const Value* __restrict__ gout,             // [B, H, T, M]
                            const Value* __restrict__ k,                // [B, H, T, E]
                            const Value* __restrict__ v,                // [B, H, T, M]
                            const float* __restrict__ initial_state,    // [B, H, E, M] or null
                            const float* __restrict__ initial_key_sum,  // [B, H, E] or null
                            const float* __restrict__ norm,             // [B, H, T] or null
                            const float* __restrict__ gout_dot_out,     // [B, H, T] or null
                            Value* __restrict__ gq,                     // [B, H, T, E]
                            float* __restrict__ states,                 // [B, H, M, E]
                            i64 B, i64 H, i64 steps, i64 E, i64 M,
                            i64 gout_stride_B, i64 gout_stride_H, i64 gout_stride_T,
                            i64 k_stride_B, i64 k_stride_H, i64 k_stride_T,
                            i64 v_stride_B, i64 v_stride_H, i64 v_stride_T,
                            i64 gq_stride_B, i64 gq_stride_H, i64 gq_stride_T, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= B * H * E) return;
    const i64 head = column / E, e = column % E, b = head / H, h = head % H;
    const NormGradient by{norm ? norm + head * steps : nullptr, gout_dot_out + head * steps, scale};
    float* state = states + head * M * E + e;
    for (i64 m = 0; m < M; ++m)
        state[m * E] = initial_state ? initial_state[(head * E + e) * M + m] : 0.0f;
    float keys = initial_key_sum ? initial_key_sum[column] : 0.0f;

    const Value* key = k + b * k_stride_B + h * k_stride_H + e;
    Value* result = gq + b * gq_stride_B + h * gq_stride_H + e;
    kgen::run_in_memory<Direction::forward>(
        state, E, M, steps, gout + b * gout_stride_B + h * gout_stride_H, gout_stride_T,
        v + b * v_stride_B + h * v_stride_H, v_stride_T,
        [&](i64 t) { return kgen::to_float(key[t * k_stride_T]); },
        [&](i64 t, float y) {
            y *= by.factor(t);
            if (norm) {
                keys += kgen::to_float(key[t * k_stride_T]);
                y = kgen::fma(by.of_norm(t), keys, y);
            }
            result[t * gq_stride_T] = kgen::from_float<Value>(y);
        });
}

KGEN_EXPORT(linear_attention_backward_q);

// gk: a loop backward in time with a column [M] of the transposed gradient of the state.
extern "C" __global__ void __launch_bounds__(kThreads)
linear_attention_backward_k(const Value* __restrict__ gout,            // [B, H, T, M]
                            const Value* __restrict__ q,               // [B, H, T, E]
                            const Value* __restrict__ v,               // [B, H, T, M]
                            const float* __restrict__ norm,            // [B, H, T] or null
                            const float* __restrict__ gout_dot_out,    // [B, H, T] or null
                            const float* __restrict__ gfinal_state,    // [B, H, E, M] or null
                            const float* __restrict__ gfinal_key_sum,  // [B, H, E] or null
                            Value* __restrict__ gk,                    // [B, H, T, E]
                            float* __restrict__ ginitial_key_sum,      // [B, H, E] or null
                            float* __restrict__ states,                // [B, H, M, E]
                            i64 B, i64 H, i64 steps, i64 E, i64 M,
                            i64 gout_stride_B, i64 gout_stride_H, i64 gout_stride_T,
                            i64 q_stride_B, i64 q_stride_H, i64 q_stride_T,
                            i64 v_stride_B, i64 v_stride_H, i64 v_stride_T,
                            i64 gk_stride_B, i64 gk_stride_H, i64 gk_stride_T, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= B * H * E) return;
    const i64 head = column / E, e = column % E, b = head / H, h = head % H;
    const NormGradient by{norm ? norm + head * steps : nullptr, gout_dot_out + head * steps, scale};
    float* state = states + head * M * E + e;
    for (i64 m = 0; m < M; ++m)
        state[m * E] = gfinal_state ? gfinal_state[(head * E + e) * M + m] : 0.0f;
    float keys = gfinal_key_sum ? gfinal_key_sum[column] : 0.0f;

    const Value* query = q + b * q_stride_B + h * q_stride_H + e;
    Value* result = gk + b * gk_stride_B + h * gk_stride_H + e;
    kgen::run_in_memory<Direction::backward>(
        state, E, M, steps, v + b * v_stride_B + h * v_stride_H, v_stride_T,
        gout + b * gout_stride_B + h * gout_stride_H, gout_stride_T,
        [&](i64 t) { return kgen::to_float(query[t * q_stride_T]) * by.factor(t); },
        [&](i64 t, float y) {
            if (norm) keys = kgen::fma(by.of_norm(t), kgen::to_float(query[t * q_stride_T]), keys);
            result[t * gk_stride_T] = kgen::from_float<Value>(y + keys);
        });
    if (ginitial_key_sum) ginitial_key_sum[column] = keys;
}

KGEN_EXPORT(linear_attention_backward_k);

// gv: a loop backward in time with a column [E] of the gradient of the state, which ends as the gradient of the initial
// state.
extern "C" __global__ void __launch_bounds__(kThreads)
linear_attention_backward_v(const Value* __restrict__ gout,          // [B, H, T, M]
                            const Value* __restrict__ q,             // [B, H, T, E]
                            const Value* __restrict__ k,             // [B, H, T, E]
                            const float* __restrict__ norm,          // [B, H, T] or null
                            const float* __restrict__ gfinal_state,  // [B, H, E, M] or null
                            Value* __restrict__ gv,                  // [B, H, T, M]
                            float* __restrict__ ginitial_state,      // [B, H, E, M] or null
                            float* __restrict__ states,              // [B, H, E, M]
                            i64 B, i64 H, i64 steps, i64 E, i64 M,
                            i64 gout_stride_B, i64 gout_stride_H, i64 gout_stride_T,
                            i64 q_stride_B, i64 q_stride_H, i64 q_stride_T,
                            i64 k_stride_B, i64 k_stride_H, i64 k_stride_T,
                            i64 gv_stride_B, i64 gv_stride_H, i64 gv_stride_T, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= B * H * M) return;
    const i64 head = column / M, m = column % M, b = head / H, h = head % H;
    const NormGradient by{norm ? norm + head * steps : nullptr, nullptr, scale};
    const i64 first = head * E * M + m;
    float* state = states + first;
    for (i64 e = 0; e < E; ++e) state[e * M] = gfinal_state ? gfinal_state[first + e * M] : 0.0f;

    const Value* gradient = gout + b * gout_stride_B + h * gout_stride_H + m;
    Value* result = gv + b * gv_stride_B + h * gv_stride_H + m;
    kgen::run_in_memory<Direction::backward>(
        state, M, E, steps, k + b * k_stride_B + h * k_stride_H, k_stride_T,
        q + b * q_stride_B + h * q_stride_H, q_stride_T,
        [&](i64 t) { return kgen::to_float(gradient[t * gout_stride_T]) * by.factor(t); },
        [&](i64 t, float y) { result[t * gv_stride_T] = kgen::from_float<Value>(y); });
    if (ginitial_state)
        for (i64 e = 0; e < E; ++e) ginitial_state[first + e * M] = state[e * M];
}

KGEN_EXPORT(linear_attention_backward_v);
