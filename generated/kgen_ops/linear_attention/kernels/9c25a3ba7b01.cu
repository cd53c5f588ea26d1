// digest: 9c25a3ba7b01
// Rendered by kgen from templates/linear_attention/forward_wgmma_split_bf16.cu.jinja
// config: wgmma_split_bf16(terms=2, copy_bytes=16)
// problem: E=64, M=64, dtype=fp32, product_dtype=tf32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention forward, wgmma_split_bf16: fp32 by wgmma on bf16 terms, for many heads. A CTA loops over one head,
// with 64 of its value features (wgmma_loop.cuh). One warpgroup splits rows into bf16 terms, one keeps the state,
// one computes the outputs.
#include "kgen/chunked/sequence.cuh"
#include "kgen/linear_attention/wgmma_loop.cuh"

namespace {

using T = float;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kTerms = 2;         // bf16 terms of an fp32 number
constexpr int kVec = 16 / 4;  // elements of one load

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "the kernel has no code for sums of keys");

using Loop = kgen::WgmmaLoop<kE, kM, kTerms, kVec, false>;

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 1)
linear_attention_forward(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                         const T* __restrict__ k,  // [B, H, T, E]
                         const T* __restrict__ v,  // [B, H, T, M]
                         const InitialState* __restrict__ initial_state,  // [B, H, E, M]
                         T* __restrict__ out,                             // [B, H, T, M]
                         FinalState* __restrict__ final_state,            // [B, H, E, M]
                         kgen::i64 H, kgen::i64 steps,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale) {
    const kgen::i64 head = blockIdx.x / Loop::kValueBlocks;
    const int value = static_cast<int>(blockIdx.x % Loop::kValueBlocks) * Loop::kBlockV;

    // 1. The rows that the CTA reads and writes.
    const kgen::RecurrenceRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        0, steps, kgen::min(kM - value, Loop::kBlockV), scale, 1.0f};

    // 2. The states before and after all steps.
    kgen::RecurrenceStates states{};
    states.initial_state = kgen::floats_at(initial_state, head * kE * kM + value);
    states.final_state = kgen::floats_at(final_state, head * kE * kM + value);
    states.initial_key_stride = states.final_key_stride = kM;
    states.initial_value_stride = states.final_value_stride = 1;
    states.final_factor = 1.0f;
    // 3. The loop over chunks, by three warpgroups.
    Loop(rows, states).run();
}

KGEN_EXPORT(linear_attention_forward);
