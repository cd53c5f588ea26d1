// digest: 6d5d25548ccf
// Rendered by kgen from templates/linear_attention/forward_warpgroups.cu.jinja
// config: warpgroups(parts=2, copy=16)
// problem: E=64, M=64, dtype=fp32, product_dtype=tf32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention forward in fp32 for many heads, by products of warpgroups: a block walks one head, with
// 64 of the value features. Its three warpgroups split rows into bf16 numbers, add up the state, and make
// outputs.
#include "kgen/chunk_place.cuh"
#include "kgen/group_walk.cuh"

namespace {

using T = float;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kParts = 2;    // bf16 numbers that one of fp32 becomes
constexpr int kVec = 16 / 4;  // values that one load brings

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "these blocks know no sums of keys");

using Walk = kgen::GroupWalk<kE, kM, kParts, kVec, false>;

}  // namespace

extern "C" __global__ void __launch_bounds__(Walk::kThreads, 1)
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
    const kgen::i64 head = blockIdx.x / Walk::kSlices;
    const int value = static_cast<int>(blockIdx.x % Walk::kSlices) * Walk::kSlice;

    const kgen::WalkRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        0, steps, kgen::min(kM - value, Walk::kSlice), scale, 1.0f};

    kgen::WalkStates states{};
    states.state = kgen::floats_at(initial_state, head * kE * kM + value);
    states.end = kgen::floats_at(final_state, head * kE * kM + value);
    states.key_stride = states.end_key_stride = kM;
    states.value_stride = states.end_value_stride = 1;
    states.end_factor = 1.0f;
    Walk(rows, states).walk();
}

KGEN_EXPORT(linear_attention_forward);
