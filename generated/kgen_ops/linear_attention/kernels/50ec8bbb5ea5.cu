// digest: 50ec8bbb5ea5
// Rendered by kgen from templates/linear_attention/forward_naive.cu.jinja
// config: naive(threads=64)
// problem: dtype=bf16
// linear_attention forward, naive: a column of the state per thread, the state in global memory. Any shape; the kernels
// test at run time which tensors are given.
#include "kgen/recurrent/recurrence.cuh"

namespace {

using Value = kgen::bf16;

constexpr int kThreads = 64;

}  // namespace

// The key sum, and the norm of every step: a thread per head.
extern "C" __global__ void __launch_bounds__(kThreads)
linear_attention_norm(const Value* __restrict__ q,                // [B, H, T, E]
                      const Value* __restrict__ k,                // [B, H, T, E]
                      const float* __restrict__ initial_key_sum,  // [B, H, E] or null
                      float* __restrict__ final_key_sum,          // [B, H, E] or null
                      float* __restrict__ norm,                   // [B, H, T] or null
                      float* __restrict__ key_sums_by_head,               // [B, H, E]
                      kgen::i64 B, kgen::i64 H, kgen::i64 steps, kgen::i64 E,
                      kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                      kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                      float scale, float eps) {
    const kgen::i64 head = static_cast<kgen::i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (head >= B * H) return;
    const kgen::i64 b = head / H, h = head % H;
    float* sums = key_sums_by_head + head * E;
    for (kgen::i64 e = 0; e < E; ++e)
        sums[e] = initial_key_sum ? initial_key_sum[head * E + e] : 0.0f;
    for (kgen::i64 t = 0; t < steps; ++t) {
        const Value* q_t = q + b * q_stride_B + h * q_stride_H + t * q_stride_T;
        const Value* k_t = k + b * k_stride_B + h * k_stride_H + t * k_stride_T;
        float product = 0.0f;
        for (kgen::i64 e = 0; e < E; ++e) {
            sums[e] += kgen::to_float(k_t[e]);
            product = kgen::fma(kgen::to_float(q_t[e]), sums[e], product);
        }
        if (norm) norm[head * steps + t] = kgen::fma(scale, product, eps);
    }
    if (final_key_sum)
        for (kgen::i64 e = 0; e < E; ++e) final_key_sum[head * E + e] = sums[e];
}

KGEN_EXPORT(linear_attention_norm);

extern "C" __global__ void __launch_bounds__(kThreads)
linear_attention_forward(const Value* __restrict__ q,              // [B, H, T, E]
                         const Value* __restrict__ k,              // [B, H, T, E]
                         const Value* __restrict__ v,              // [B, H, T, M]
                         const float* __restrict__ initial_state,  // [B, H, E, M] or null
                         const float* __restrict__ norm,           // [B, H, T] or null
                         Value* __restrict__ out,                  // [B, H, T, M]
                         float* __restrict__ final_state,          // [B, H, E, M] or null
                         float* __restrict__ states,               // [B, H, E, M]
                         kgen::i64 B, kgen::i64 H, kgen::i64 steps, kgen::i64 E, kgen::i64 M,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale) {
    const kgen::i64 column = static_cast<kgen::i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column >= B * H * M) return;
    const kgen::i64 head = column / M, m = column % M, b = head / H, h = head % H;
    const kgen::i64 first = head * E * M + m;  // of the column, in a state
    for (kgen::i64 e = 0; e < E; ++e)
        states[first + e * M] = initial_state ? initial_state[first + e * M] : 0.0f;

    const Value* values = v + b * v_stride_B + h * v_stride_H + m;
    Value* results = out + b * out_stride_B + h * out_stride_H + m;
    kgen::run_in_memory<kgen::Direction::forward>(
        states + first, M, E, steps, q + b * q_stride_B + h * q_stride_H, q_stride_T,
        k + b * k_stride_B + h * k_stride_H, k_stride_T,
        [&](kgen::i64 t) { return kgen::to_float(values[t * v_stride_T]); },
        [&](kgen::i64 t, float y) {
            y *= scale;
            if (norm) y /= norm[head * steps + t];
            results[t * out_stride_T] = kgen::from_float<Value>(y);
        });

    if (final_state)
        for (kgen::i64 e = 0; e < E; ++e) final_state[first + e * M] = states[first + e * M];
}

KGEN_EXPORT(linear_attention_forward);
