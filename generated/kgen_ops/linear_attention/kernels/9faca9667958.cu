// digest: 9faca9667958
// Rendered by kgen from templates/linear_attention/backward_warpgroups.cu.jinja
// config: warpgroups(parts=3, copy=16)
// problem: E=64, M=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention backward in fp32 for many heads, by products of warpgroups. Each gradient is a walk like the
// forward pass's: gq of gout, v, k, and backwards in time gk of v, gout, q and gv of k, q, gout. The walks of a
// head are neighbouring blocks, so that what one reads another finds in L2.
#include "kgen/chunk_place.cuh"
#include "kgen/group_walk.cuh"

namespace {

using T = float;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kParts = 3;    // bf16 numbers that one of fp32 becomes
constexpr int kVec = 16 / 4;  // values that one load brings

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none> &&
                  !kgen::kPresent<kgen::none>,
              "these walks know no sums of keys");

// A given gradient of the last state is not scaled, so that the sum it starts must be: then q and
// gout are scaled on their way into it, else the outputs are.
constexpr bool kScaled = kgen::kPresent<FinalState>;

// gq and gk have the features of k as values, gv those of v.
using KeyWalk = kgen::GroupWalk<kM, kE, kParts, kVec, kScaled>;
using ValueWalk = kgen::GroupWalk<kE, kM, kParts, kVec, kScaled>;
static_assert(KeyWalk::kSlices == 1 && ValueWalk::kSlices == 1, "a block has all features of a gradient");

}  // namespace

extern "C" __global__ void __launch_bounds__(KeyWalk::kThreads, 1)
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

    kgen::WalkRows<T> rows{};
    kgen::WalkStates states{};
    if (gradient == 0) {
        rows.a = of_gout, rows.b = of_v, rows.v = of_k;
        rows.out = kgen::head_rows(gq, head, H, gq_stride_B, gq_stride_H, gq_stride_T);
        states.state = kgen::floats_at(initial_state, state);
    } else if (gradient == 1) {
        rows.a = of_v.reversed(steps), rows.b = of_gout.reversed(steps), rows.v = of_q.reversed(steps);
        rows.out = kgen::head_rows(gk, head, H, gk_stride_B, gk_stride_H, gk_stride_T).reversed(steps);
        states.state = kgen::floats_at(gfinal_state, state);
    } else {
        rows.a = of_k.reversed(steps), rows.b = of_q.reversed(steps), rows.v = of_gout.reversed(steps);
        rows.out = kgen::head_rows(gv, head, H, gv_stride_B, gv_stride_H, gv_stride_T).reversed(steps);
        states.state = kgen::floats_at(gfinal_state, state);
        states.end = kgen::floats_at(ginitial_state, state);
    }
    const bool scaled = kScaled && gradient != 0;
    rows.end = steps;
    rows.values = gradient == 2 ? kM : kE;
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;
    states.key_stride = gradient == 2 ? kM : 1;  // states are [E, M], values of gq and gk along E
    states.value_stride = gradient == 2 ? 1 : kM;
    states.end_key_stride = kM;
    states.end_value_stride = 1;
    states.end_factor = scaled ? 1.0f : scale;

    // One body for all walks of one shape.
    if (kE == kM || gradient != 2) {
        KeyWalk(rows, states).walk();
    } else {
        ValueWalk(rows, states).walk();
    }
}

KGEN_EXPORT(linear_attention_backward);
