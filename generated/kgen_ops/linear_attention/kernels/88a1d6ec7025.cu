// digest: 88a1d6ec7025
// Rendered by kgen from templates/linear_attention/forward_chunk_scan.cu.jinja
// config: chunk_scan(chunk=16, value_tiles=2, value_warps=2, key_warps=1, stages=3, copy_bytes=16, segments=32, min_blocks=2, scan_vec=1, overlap=1)
// problem: E=64, M=64, dtype=fp32, product_dtype=tf32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention forward, chunk_scan: tensor cores, for few heads, with many short segments. Three kernels:
//
//     sums     k v^T of each segment
//     scan     the sums become the states before the segments (segment_scan.cuh)
//     forward  each CTA reads the state before its segment and loops over the chunks (chunk_loop.cuh)
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/chunk_loop.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/chunked/segment_scan.cuh"

namespace {

using T = float;
using Product = kgen::tf32;
using InitialState = kgen::none;
using InitialKeySum = kgen::none;
using FinalState = kgen::none;
using FinalKeySum = kgen::none;
using Norm = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kChunk = 16;             // steps
constexpr int kValueTiles = 2;  // fragments of 16 value features per warp
constexpr int kValueWarps = 2;  // warps of a CTA along the value features
constexpr int kKeyWarps = 1;      // warps of a CTA along the keys, for the same value features
constexpr int kStages = 3;           // chunks in the shared-memory ring
constexpr int kCopy = 16;         // bytes of one cp.async
constexpr int kSegments = 32;       // of the steps of a head, a CTA each
constexpr int kMinBlocks = 2;    // CTAs per SM that __launch_bounds__ reserves registers for
constexpr int kScanVec = 1;        // elements of a state per thread of the scan

constexpr bool kNormalised = kgen::kPresent<Norm>;
constexpr bool kKeySums = kNormalised || kgen::kPresent<FinalKeySum>;
constexpr int kSums = kSegments - 1;  // the sum of the last segment is not needed
constexpr int kScanThreads = 128;

using Loop = kgen::ChunkLoop<T, Product, kE, kM, kChunk, kValueTiles, kValueWarps, kKeyWarps,
                             kStages, kCopy, kKeySums, kNormalised, false, kgen::NoDecayRows,
                             kgen::NoNormKey, kgen::kPresent<FinalState>>;
constexpr int kValueBlocks = (kM + Loop::kBlockV - 1) / Loop::kBlockV;

}  // namespace

// Sums of k v^T over each segment but the last.
extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
linear_attention_sums(const T* __restrict__ k,  // [B, H, T, E], rows k_stride_T apart
                      const T* __restrict__ v,  // [B, H, T, M]
                      float* __restrict__ segment_sums,      // [B * H, segments - 1, E, M]
                      float* __restrict__ segment_key_sums,  // [B * H, segments - 1, E]
                      kgen::i64 H, kgen::i64 steps,
                      kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                      kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T) {
    kgen::griddepcontrol_launch_dependents();
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSums, kValueBlocks);
    const int value = place.rest * Loop::kBlockV;
    const auto keys = kgen::head_rows(k, place.head, H, k_stride_B, k_stride_H, k_stride_T);
    const auto values = kgen::head_rows(v, place.head, H, v_stride_B, v_stride_H, v_stride_T).from(value);
    const kgen::i64 sum = place.head * kSums + place.segment;

    const kgen::RecurrenceRows<T> rows{keys, keys, values, {}, place.first, place.end,
                                 kgen::min(kM - value, Loop::kBlockV), 1.0f, 1.0f};
    kgen::RecurrenceStates states{};
    states.final_state = segment_sums + sum * kE * kM + value;
    states.final_key_stride = kM;
    states.final_value_stride = 1;
    if (place.rest == 0) states.final_key_sum = segment_key_sums + sum * kE;
    Loop(rows, states).sum_segment();
}

KGEN_EXPORT(linear_attention_sums);

// In place: sum i of k v^T becomes the state before segment i + 1, and sum i of k the key sum before segment i + 1.
extern "C" __global__ void __launch_bounds__(kScanThreads)
linear_attention_scan(const InitialState* __restrict__ initial_state,     // [B, H, E, M]
                      const InitialKeySum* __restrict__ initial_key_sum,  // [B, H, E]
                      float* __restrict__ segment_sums,      // [B * H, segments - 1, E, M]
                      float* __restrict__ segment_key_sums,  // [B * H, segments - 1, E]
                      kgen::i64 B, kgen::i64 H) {
    kgen::griddepcontrol_launch_dependents();
    const kgen::i64 heads = B * H;
    const kgen::i64 index = static_cast<kgen::i64>(blockIdx.x) * kScanThreads + kgen::thread_rank();
    kgen::griddepcontrol_wait(segment_sums, segment_key_sums);
    kgen::states_before_segments<kSums, kScanVec, kE * kM>(
        segment_sums, kgen::floats_at(initial_state, 0), heads, index);
    if constexpr (kKeySums) {  // the threads after those that have states
        kgen::states_before_segments<kSums, 1, kE>(
            segment_key_sums, kgen::floats_at(initial_key_sum, 0), heads,
            index - heads * (kE * kM / kScanVec));
    }
}

KGEN_EXPORT(linear_attention_scan);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
linear_attention_forward(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                         const T* __restrict__ k,  // [B, H, T, E]
                         const T* __restrict__ v,  // [B, H, T, M]
                         const InitialState* __restrict__ initial_state,     // [B, H, E, M]
                         const InitialKeySum* __restrict__ initial_key_sum,  // [B, H, E]
                         const float* __restrict__ segment_sums,      // [B * H, segments - 1, E, M]
                         const float* __restrict__ segment_key_sums,  // [B * H, segments - 1, E]
                         T* __restrict__ out,                      // [B, H, T, M]
                         FinalState* __restrict__ final_state,     // [B, H, E, M]
                         FinalKeySum* __restrict__ final_key_sum,  // [B, H, E]
                         Norm* __restrict__ norm,                  // [B, H, T]
                         kgen::i64 H, kgen::i64 steps,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale, float eps) {
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSegments, kValueBlocks);
    const int value = place.rest * Loop::kBlockV;
    const bool last = place.segment == kSegments - 1;
    const kgen::i64 head = place.head;

    // 1. The rows that the CTA reads and writes.
    const kgen::RecurrenceRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        place.first, place.end, kgen::min(kM - value, Loop::kBlockV), scale, 1.0f};

    // 2. The states before and after the segment; the scan has replaced the sums by them.
    kgen::griddepcontrol_wait(segment_sums, segment_key_sums);
    kgen::RecurrenceStates states{};
    states.initial_state = kgen::state_before_segment<kSums, kE * kM>(
        segment_sums, kgen::floats_at(initial_state, 0), head, place.segment);
    if (states.initial_state != nullptr) states.initial_state += value;
    if constexpr (kKeySums)
        states.initial_key_sum = kgen::state_before_segment<kSums, kE>(
            segment_key_sums, kgen::floats_at(initial_key_sum, 0), head, place.segment);
    states.initial_key_stride = states.final_key_stride = kM;
    states.initial_value_stride = states.final_value_stride = 1;
    states.final_factor = 1.0f;
    if (last) states.final_state = kgen::floats_at(final_state, head * kE * kM + value);
    if (last && place.rest == 0) states.final_key_sum = kgen::floats_at(final_key_sum, head * kE);
    if (place.rest == 0) states.norm = kgen::floats_at(norm, head * steps);
    states.eps = eps;
    // 3. The chunk loop.
    Loop(rows, states).run();
}

KGEN_EXPORT(linear_attention_forward);
