// digest: 2852cbc32f3a
// Rendered by kgen from templates/linear_attention/forward_warp_specialized.cu.jinja
// config: warp_specialized(block_v=64, chunk=32, chunks=4, key_warps=2, value_warps=2, stages=3, copy_bytes=16, min_blocks=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention forward, warp_specialized: tensor cores, bf16, for many heads. A CTA loops over one head, with
// block_v of its value features (warp_specialized_loop.cuh). Producer warps keep the state; consumer warps compute
// the outputs, a batch of steps behind.
#include "kgen/chunked/sequence.cuh"
#include "kgen/linear_attention/warp_specialized_loop.cuh"

namespace {

using T = kgen::bf16;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kBlockV = 64;          // value features of a CTA
constexpr int kChunk = 32;             // steps with scores between them
constexpr int kChunks = 4;           // of a batch, which has a consumer warp for every 16 steps
constexpr int kKeyWarps = 2;      // producer warps along the key features
constexpr int kValueWarps = 2;  // and along the value features
constexpr int kStages = 3;           // batches in the shared-memory ring
constexpr int kCopy = 16;         // bytes of one cp.async
constexpr int kMinBlocks = 1;    // CTAs per SM that __launch_bounds__ reserves registers for

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "the kernel has no code for sums of keys");

using Loop = kgen::WarpSpecializedLoop<T, kE, kM, kBlockV, kChunk, kChunks, kKeyWarps, kValueWarps, kStages,
                            kCopy>;

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
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
    const kgen::BlockSegment place(steps, kChunk, 1, 1, Loop::kValueBlocks);
    const int value = place.rest * kBlockV;
    const kgen::i64 head = place.head;

    // 1. The rows that the CTA reads and writes.
    const kgen::RecurrenceRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        place.first, place.end, kgen::min(kM - value, kBlockV), scale, 1.0f};

    // 2. The states before and after all steps.
    kgen::RecurrenceStates states{};
    states.initial_state = kgen::floats_at(initial_state, head * kE * kM + value);
    states.final_state = kgen::floats_at(final_state, head * kE * kM + value);
    states.initial_key_stride = states.final_key_stride = kM;
    states.initial_value_stride = states.final_value_stride = 1;
    states.final_factor = 1.0f;
    // 3. The loop over batches, by producer and consumer warps.
    Loop(rows, states).run();
}

KGEN_EXPORT(linear_attention_forward);
