// digest: e2078aeb6d3b
// Rendered by kgen from templates/linear_attention/forward_meeting.cu.jinja
// config: meeting(blocks=8, segment=256, slice=128, batch=32, copy=16, score_parts=1, min_blocks=1, products=wgmma, overlap=1)
// problem: E=128, M=128, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention forward on tensor cores for few heads: a group of blocks does a head and slice of the
// value features, a segment of the steps each, and exchanges the segments' sums. The blocks meet at
// counters in global memory, which a first kernel clears.
#include "kgen/chunk_place.cuh"
#include "kgen/dependent_launch.cuh"
#include "kgen/group_segment.cuh"
#include "kgen/meeting.cuh"
#include "kgen/segment_walk.cuh"

namespace {

using T = kgen::bf16;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 128;
constexpr int kM = 128;
constexpr int kBlocks = 8;         // of a group
constexpr int kSegment = 256;       // steps of a block, which has a warp for every 32
constexpr int kSlice = 128;           // its value features
constexpr int kBatch = 32;           // steps per group of copies
constexpr int kCopy = 16;             // bytes that one copy moves
constexpr int kScoreParts = 1;  // numbers of 16 bits that a score is
constexpr int kMinBlocks = 1;  // blocks per SM that registers leave room for

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "these blocks know no sums of keys");

static_assert(kCopy == 16, "panels are pieces of 16 bytes");
using Segment = kgen::GroupSegment<T, kE, kM, kSlice, kSegment, kBatch, kScoreParts>;
using Walk = kgen::SegmentWalk<Segment, kBlocks, kgen::kPresent<InitialState>,
                               kgen::kPresent<FinalState>>;

}  // namespace

extern "C" __global__ void __launch_bounds__(64)
linear_attention_clear(kgen::i32* counters,  // [B * H * slices, 32]
                       kgen::i64 B, kgen::i64 H) {
    // What came before may have made the inputs, or still use the workspaces. The next kernel need not
    // wait for that: none of its blocks begins before each block here has come past its wait.
    kgen::wait_for_earlier_kernel();
    kgen::let_next_kernel_start();
    kgen::clear_counters(counters, B * H * Walk::kSlices);
}

KGEN_EXPORT(linear_attention_clear);

extern "C" __global__ void __launch_bounds__(Walk::kThreads, kMinBlocks)
linear_attention_forward(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                         const T* __restrict__ k,  // [B, H, T, E]
                         const T* __restrict__ v,  // [B, H, T, M]
                         const InitialState* __restrict__ initial_state,  // [B, H, E, M]
                         float* sums,                                     // see Walk::Exchange
                         T* states,                                       // the same
                         kgen::i32* counters,                             // [B * H * slices, 32]
                         T* __restrict__ out,                             // [B, H, T, M]
                         FinalState* __restrict__ final_state,            // [B, H, E, M]
                         kgen::i64 H, kgen::i64 steps,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale) {
    const kgen::GroupPlace place = kgen::place_in_group<kBlocks>();
    const kgen::i64 head = place.group / Walk::kSlices;
    const int value = static_cast<int>(place.group % Walk::kSlices) * kSlice;

    const kgen::WalkRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        0, steps, kgen::min(kM - value, kSlice), scale, 1.0f};

    const kgen::i64 state = head * kE * kM + value;
    Walk(rows, {kgen::floats_at(initial_state, state), kgen::floats_at(final_state, state), rows.values},
         {place, counters, sums, states})
        .walk();
}

KGEN_EXPORT_GROUPS(linear_attention_forward, kBlocks);
