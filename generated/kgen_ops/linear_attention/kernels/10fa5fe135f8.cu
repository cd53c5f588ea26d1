// digest: 10fa5fe135f8
// Rendered by kgen from templates/linear_attention/forward_scanned.cu.jinja
// config: scanned(chunk=16, value_tiles=2, value_warps=2, key_warps=1, stages=3, copy=16, segments=32, min_blocks=2, scan_vec=1, overlap=1)
// problem: E=64, M=64, dtype=fp32, product_dtype=tf32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention forward on tensor cores for few heads: many short segments. One kernel sums each
// segment's outer products, one turns the sums into the states before the segments, and in the last
// each block reads one state and walks its few chunks.
#include "kgen/chunk_place.cuh"
#include "kgen/chunk_walk.cuh"
#include "kgen/dependent_launch.cuh"
#include "kgen/segment_scan.cuh"

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
constexpr int kValueWarps = 2;  // warps side by side along the value features
constexpr int kKeyWarps = 1;      // warps that share these features' keys
constexpr int kStages = 3;           // chunks in shared memory
constexpr int kCopy = 16;               // bytes that one copy moves
constexpr int kSegments = 32;       // blocks in a row along the steps
constexpr int kMinBlocks = 2;    // blocks per SM that registers leave room for
constexpr int kScanWidth = 1;      // values of a state per thread of the scan

constexpr bool kNormalised = kgen::kPresent<Norm>;
constexpr bool kKeySums = kNormalised || kgen::kPresent<FinalKeySum>;
constexpr int kParts = kSegments - 1;  // nobody needs the sum of the last segment
constexpr int kScanThreads = 128;

using Walk = kgen::ChunkWalk<T, Product, kE, kM, kChunk, kValueTiles, kValueWarps, kKeyWarps,
                             kStages, kCopy, kKeySums, kNormalised>;
constexpr int kSlices = (kM + Walk::kSlice - 1) / Walk::kSlice;

}  // namespace

// Sums of k v^T over each segment but the last.
extern "C" __global__ void __launch_bounds__(Walk::kThreads, kMinBlocks)
linear_attention_sums(const T* __restrict__ k,  // [B, H, T, E], rows k_stride_T apart
                      const T* __restrict__ v,  // [B, H, T, M]
                      float* __restrict__ parts,      // [B * H, segments - 1, E, M]
                      float* __restrict__ key_parts,  // [B * H, segments - 1, E]
                      kgen::i64 H, kgen::i64 steps,
                      kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                      kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T) {
    kgen::let_next_kernel_start();
    const kgen::WalkPlace place(steps, kChunk, kSegments, kParts, kSlices);
    const int value = place.rest * Walk::kSlice;
    const auto keys = kgen::head_rows(k, place.head, H, k_stride_B, k_stride_H, k_stride_T);
    const auto values = kgen::head_rows(v, place.head, H, v_stride_B, v_stride_H, v_stride_T).from(value);
    const kgen::i64 part = place.head * kParts + place.segment;

    const kgen::WalkRows<T> rows{keys, keys, values, {}, place.first, place.end,
                                 kgen::min(kM - value, Walk::kSlice), 1.0f, 1.0f};
    kgen::WalkStates states{};
    states.end = parts + part * kE * kM + value;
    states.end_key_stride = kM;
    states.end_value_stride = 1;
    if (place.rest == 0) states.end_key_sum = key_parts + part * kE;
    Walk(rows, states).sum();
}

KGEN_EXPORT(linear_attention_sums);

// In place: the sums become states before the segments behind them, and so do the sums of keys.
extern "C" __global__ void __launch_bounds__(kScanThreads)
linear_attention_scan(const InitialState* __restrict__ initial_state,     // [B, H, E, M]
                      const InitialKeySum* __restrict__ initial_key_sum,  // [B, H, E]
                      float* __restrict__ parts,      // [B * H, segments - 1, E, M]
                      float* __restrict__ key_parts,  // [B * H, segments - 1, E]
                      kgen::i64 B, kgen::i64 H) {
    kgen::let_next_kernel_start();
    const kgen::i64 heads = B * H;
    const kgen::i64 index = static_cast<kgen::i64>(blockIdx.x) * kScanThreads + kgen::thread_rank();
    kgen::wait_for_earlier_kernel(parts, key_parts);
    kgen::scan_states<kParts, kScanWidth, kE * kM>(parts, kgen::floats_at(initial_state, 0), heads,
                                                   index);
    if constexpr (kKeySums) {  // behind the threads that have states
        kgen::scan_states<kParts, 1, kE>(key_parts, kgen::floats_at(initial_key_sum, 0), heads,
                                         index - heads * (kE * kM / kScanWidth));
    }
}

KGEN_EXPORT(linear_attention_scan);

extern "C" __global__ void __launch_bounds__(Walk::kThreads, kMinBlocks)
linear_attention_forward(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                         const T* __restrict__ k,  // [B, H, T, E]
                         const T* __restrict__ v,  // [B, H, T, M]
                         const InitialState* __restrict__ initial_state,     // [B, H, E, M]
                         const InitialKeySum* __restrict__ initial_key_sum,  // [B, H, E]
                         const float* __restrict__ before,      // [B * H, segments - 1, E, M]
                         const float* __restrict__ key_before,  // [B * H, segments - 1, E]
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
    const kgen::WalkPlace place(steps, kChunk, kSegments, kSegments, kSlices);
    const int value = place.rest * Walk::kSlice;
    const bool last = place.segment == kSegments - 1;
    const kgen::i64 head = place.head;

    const kgen::WalkRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        place.first, place.end, kgen::min(kM - value, Walk::kSlice), scale, 1.0f};

    kgen::wait_for_earlier_kernel(before, key_before);
    kgen::WalkStates states{};
    states.state = kgen::state_before<kParts, kE * kM>(before, kgen::floats_at(initial_state, 0), head,
                                                       place.segment);
    if (states.state != nullptr) states.state += value;
    if constexpr (kKeySums)
        states.key_sum = kgen::state_before<kParts, kE>(
            key_before, kgen::floats_at(initial_key_sum, 0), head, place.segment);
    states.key_stride = states.end_key_stride = kM;
    states.value_stride = states.end_value_stride = 1;
    states.end_factor = 1.0f;
    if (last) states.end = kgen::floats_at(final_state, head * kE * kM + value);
    if (last && place.rest == 0) states.end_key_sum = kgen::floats_at(final_key_sum, head * kE);
    if (place.rest == 0) states.norm = kgen::floats_at(norm, head * steps);
    states.eps = eps;
    Walk(rows, states).walk();
}

KGEN_EXPORT(linear_attention_forward);
