// digest: 3b99f890456b
// Rendered by kgen from templates/linear_attention/forward_split_t.cu.jinja
// config: split_t(head_ctas=16, segment=256, block_v=64, batch=32, copy_bytes=16, score_terms=1, min_blocks=1, products=wgmma, overlap=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention forward, split_t: tensor cores, bf16, for few heads. Several CTAs share a head: each has a segment
// of the steps, and they exchange the segments' sums through global memory. In a round (split_t_loop.cuh) a CTA
//
//     1. sums k v^T over its segment and writes the sum,
//     2. computes the part of its outputs that comes from its own segment,
//     3. gets the state before its segment from the exchange, across the grid barrier of the head's CTAs
//        (grid_barrier.cuh), whose counters a first kernel clears,
//     4. adds q times that state and writes the outputs.
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/linear_attention/split_t_wgmma.cuh"
#include "kgen/primitives/grid_barrier.cuh"
#include "kgen/linear_attention/split_t_loop.cuh"

namespace {

using T = kgen::bf16;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kHeadCtas = 16;      // CTAs of a head
constexpr int kSegment = 256;         // steps of a CTA, which has a consumer warp for every 32
constexpr int kBlockV = 64;          // value features of a CTA
constexpr int kBatch = 32;             // steps per group of copies
constexpr int kCopy = 16;         // bytes of one cp.async
constexpr int kScoreTerms = 1;  // bf16 terms of a score
constexpr int kMinBlocks = 1;    // CTAs per SM that __launch_bounds__ reserves registers for

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "the kernel has no code for sums of keys");

static_assert(kCopy == 16, "panels are filled by copies of 16 bytes");
using Segment = kgen::WgmmaSegment<T, kE, kM, kBlockV, kSegment, kBatch, kScoreTerms>;
using Loop = kgen::SplitTLoop<Segment, kHeadCtas, kgen::kPresent<InitialState>,
                               kgen::kPresent<FinalState>>;

}  // namespace

extern "C" __global__ void __launch_bounds__(64)
linear_attention_clear(kgen::i32* counters,  // [B * H * blocks of value features, 32]
                       kgen::i64 B, kgen::i64 H) {
    // The kernel before this plan may still write the inputs or use the workspaces. The next kernel need not wait
    // for it: none of its CTAs launches before every CTA here has passed this wait.
    kgen::griddepcontrol_wait();
    kgen::griddepcontrol_launch_dependents();
    kgen::clear_grid_barriers(counters, B * H * Loop::kValueBlocks);
}

KGEN_EXPORT(linear_attention_clear);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
linear_attention_forward(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                         const T* __restrict__ k,  // [B, H, T, E]
                         const T* __restrict__ v,  // [B, H, T, M]
                         const InitialState* __restrict__ initial_state,  // [B, H, E, M]
                         float* sums,                                     // layout: see Loop::Exchange
                         T* states,                                       // the same
                         kgen::i32* counters,                             // one line per grid barrier
                         T* __restrict__ out,                             // [B, H, T, M]
                         FinalState* __restrict__ final_state,            // [B, H, E, M]
                         kgen::i64 H, kgen::i64 steps,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale) {
    // The CTA's head, its rank among the CTAs of the head, and its first value feature.
    const kgen::CtaGroup cta = kgen::cta_group<kHeadCtas>();
    const kgen::i64 head = cta.group / Loop::kValueBlocks;
    const int value = static_cast<int>(cta.group % Loop::kValueBlocks) * kBlockV;

    const kgen::RecurrenceRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        0, steps, kgen::min(kM - value, kBlockV), scale, 1.0f};

    const kgen::i64 state = head * kE * kM + value;
    Loop(rows, {kgen::floats_at(initial_state, state), kgen::floats_at(final_state, state), rows.values},
         {cta, counters, sums, states})
        .run();
}

KGEN_EXPORT_CTA_GROUPS(linear_attention_forward, kHeadCtas);
