// digest: 1d5144f79b2f
// Rendered by kgen from templates/linear_attention/forward_two_teams.cu.jinja
// config: two_teams(slice=32, chunk=32, chunks=4, key_warps=2, value_warps=1, stages=3, copy=16, min_blocks=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=fp32, initial_key_sum_dtype=none, final_state_dtype=fp32, final_key_sum_dtype=none, norm_dtype=none
// Linear attention forward on tensor cores for many heads: a block walks one head, with a slice of the
// value features. One team of its warps keeps the state, the other makes outputs, a batch behind.
#include "kgen/chunk_place.cuh"
#include "kgen/team_walk.cuh"

namespace {

using T = kgen::bf16;
using InitialState = float;
using FinalState = float;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kSlice = 32;             // value features of a block
constexpr int kChunk = 32;             // steps whose scores are taken
constexpr int kChunks = 4;           // of a batch, which has a warp for every 16 steps
constexpr int kKeyWarps = 2;      // warps of the state: along its key features
constexpr int kValueWarps = 1;  // and along the value features
constexpr int kStages = 3;           // batches in shared memory
constexpr int kCopy = 16;               // bytes that one copy moves
constexpr int kMinBlocks = 1;    // blocks per SM that registers leave room for

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "these blocks know no sums of keys");

using Walk = kgen::TeamWalk<T, kE, kM, kSlice, kChunk, kChunks, kKeyWarps, kValueWarps, kStages,
                            kCopy>;

}  // namespace

extern "C" __global__ void __launch_bounds__(Walk::kThreads, kMinBlocks)
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
    const kgen::WalkPlace place(steps, kChunk, 1, 1, Walk::kSlices);
    const int value = place.rest * kSlice;
    const kgen::i64 head = place.head;

    const kgen::WalkRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        place.first, place.end, kgen::min(kM - value, kSlice), scale, 1.0f};

    kgen::WalkStates states{};
    states.state = kgen::floats_at(initial_state, head * kE * kM + value);
    states.end = kgen::floats_at(final_state, head * kE * kM + value);
    states.key_stride = states.end_key_stride = kM;
    states.value_stride = states.end_value_stride = 1;
    states.end_factor = 1.0f;
    Walk(rows, states).walk();
}

KGEN_EXPORT(linear_attention_forward);
