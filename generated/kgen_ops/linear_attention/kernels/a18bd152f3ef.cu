// digest: a18bd152f3ef
// Rendered by kgen from templates/linear_attention/backward_wgmma_split_bf16.cu.jinja
// config: wgmma_split_bf16(terms=3, copy_bytes=16)
// problem: E=64, M=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, wgmma_split_bf16: fp32 by wgmma on bf16 terms, for many heads. Each gradient is a
// recurrence like the forward pass's (wgmma_loop.cuh), out_t = a_t S_t with S_t = S_{t-1} + b_t v_t^T:
//
//     gq: a, b, v = gout, v, k             forward in time
//     gk: a, b, v = v, gout, q             backward in time
//     gv: a, b, v = k, q, gout             backward in time
//
// The three CTAs of a head have consecutive indices, so that they find each other's rows in L2.
#include "kgen/chunked/sequence.cuh"
#include "kgen/linear_attention/wgmma_loop.cuh"

namespace {

using T = float;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kTerms = 3;         // bf16 terms of an fp32 number
constexpr int kVec = 16 / 4;  // elements of one load

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none> &&
                  !kgen::kPresent<kgen::none>,
              "the kernel has no code for sums of keys");

// The gradient of the final state is not multiplied by scale, but the sum that starts from it is. If it is given,
// scale multiplies the rows that enter the sum; otherwise it multiplies the outputs.
constexpr bool kScaled = kgen::kPresent<FinalState>;

// gq and gk have the features of k as value features, gv has the features of v.
using KeyLoop = kgen::WgmmaLoop<kM, kE, kTerms, kVec, kScaled>;
using ValueLoop = kgen::WgmmaLoop<kE, kM, kTerms, kVec, kScaled>;
static_assert(KeyLoop::kValueBlocks == 1 && ValueLoop::kValueBlocks == 1, "a CTA has all features of a gradient");

}  // namespace

extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, 1)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,  // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,     // [B, H, E, M]
    T* __restrict__ gq,                              // [B, H, T, E]
    T* __restrict__ gk,                              // [B, H, T, E]
    T* __restrict__ gv,                              // [B, H, T, M]
    InitialState* __restrict__ ginitial_state,       // [B, H, E, M]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
    kgen::i64 gq_stride_B, kgen::i64 gq_stride_H, kgen::i64 gq_stride_T,
    kgen::i64 gk_stride_B, kgen::i64 gk_stride_H, kgen::i64 gk_stride_T,
    kgen::i64 gv_stride_B, kgen::i64 gv_stride_H, kgen::i64 gv_stride_T, float scale) {
    const int gradient = static_cast<int>(blockIdx.x % 3);  // of q, k, v
    const kgen::i64 head = blockIdx.x / 3, state = head * kE * kM;
    const auto of_gout = kgen::head_rows(gout, head, H, gout_stride_B, gout_stride_H, gout_stride_T);
    const auto of_q = kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T);
    const auto of_k = kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T);
    const auto of_v = kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T);

    // 1. Rows and states of the gradient's recurrence.
    kgen::RecurrenceRows<T> rows{};
    kgen::RecurrenceStates states{};
    if (gradient == 0) {
        rows.a = of_gout, rows.b = of_v, rows.v = of_k;
        rows.out = kgen::head_rows(gq, head, H, gq_stride_B, gq_stride_H, gq_stride_T);
        states.initial_state = kgen::floats_at(initial_state, state);
    } else if (gradient == 1) {
        rows.a = of_v.reversed(steps), rows.b = of_gout.reversed(steps), rows.v = of_q.reversed(steps);
        rows.out = kgen::head_rows(gk, head, H, gk_stride_B, gk_stride_H, gk_stride_T).reversed(steps);
        states.initial_state = kgen::floats_at(gfinal_state, state);
    } else {
        rows.a = of_k.reversed(steps), rows.b = of_q.reversed(steps), rows.v = of_gout.reversed(steps);
        rows.out = kgen::head_rows(gv, head, H, gv_stride_B, gv_stride_H, gv_stride_T).reversed(steps);
        states.initial_state = kgen::floats_at(gfinal_state, state);
        states.final_state = kgen::floats_at(ginitial_state, state);
    }
    const bool scaled = kScaled && gradient != 0;
    rows.end = steps;
    rows.values = gradient == 2 ? kM : kE;
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;
    states.initial_key_stride = gradient == 2 ? kM : 1;  // states are [E, M]; gq and gk have value features E
    states.initial_value_stride = gradient == 2 ? 1 : kM;
    states.final_key_stride = kM;
    states.final_value_stride = 1;
    states.final_factor = scaled ? 1.0f : scale;

    // 2. The chunk loop. One instantiation for all loops of one shape.
    if (kE == kM || gradient != 2) {
        KeyLoop(rows, states).run();
    } else {
        ValueLoop(rows, states).run();
    }
}

KGEN_EXPORT(linear_attention_backward);
