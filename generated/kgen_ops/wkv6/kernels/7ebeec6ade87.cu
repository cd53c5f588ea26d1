// digest: 7ebeec6ade87
// Rendered by kgen from templates/wkv/forward_chunk_loop.cu.jinja
// config: chunk_loop(copy_bytes=16, min_blocks=2, chunk=16, value_tiles=1, value_warps=2, key_warps=2, stages=3, segments=8)
// problem: K=100, V=72, dtype=fp32, w_dtype=fp32, u_dtype=fp32, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv5 and wkv6 forward on tensor cores: a block loops over the chunks of one head, or of one segment of its
// steps, with kBlockV value features of the state in registers.
//
//     wkv_segment_states  the state each segment but the last one adds, and its product of decays
//     wkv_forward         y; a segment's initial state comes from the segments before it
//
// Shared memory and barriers: kgen/chunked/chunk_loop.cuh; decays within a chunk: kgen/chunked/chunk_decay.cuh.
#include "kgen/chunked/chunk_loop.cuh"
#include "kgen/wkv/tensors.cuh"

namespace {

using Value = float;
using W = float;
using U = float;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv::Rows;
using kgen::wkv::step_rows;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kK = 100;
constexpr int kV = 72;
constexpr int kChunk = 16;             // steps
constexpr int kValueTiles = 1;  // fragments of 16 value features per warp
constexpr int kValueWarps = 2;  // warps side by side along the value features
constexpr int kKeyWarps = 2;      // warps that split the keys of these features
constexpr int kStages = 3;           // chunks in shared memory
constexpr int kCopyBytes = 16;    // of one asynchronous copy
constexpr int kSegments = 8;       // parts of T, one block each
constexpr int kMinBlocks = 2;    // blocks per SM that registers leave room for

// Products are as accurate as fp32 if the state is returned, else as the tensors' type.
using Product = kgen::wkv::ProductOf<Value, kgen::none>::Type;
using Loop = kgen::ChunkLoop<Value, Product, kK, kV, kChunk, kValueTiles, kValueWarps, kKeyWarps,
                             kStages, kCopyBytes, false, false, false,
                             kgen::DecayRows<W, U, kForm>>;
constexpr int kBlockV = Loop::kBlockV;  // value features of a block
constexpr int kValueBlocks = kgen::ceil_div(kV, kBlockV);

static_assert(kSegments == 1 || !kgen::kPresent<Offset>, "packed sequences have no segments");

// By one block: the state that a segment adds, for kBlockV value features of a head.
KGEN_DEVICE void sum_segment(i64 H, i64 T, Rows<const Value> k, Rows<const Value> v,
                             Rows<const W> w, float* segment_states, float* segment_decays) {
    // 1. The block's head, segment and value features.
    const kgen::BlockSegment place(T, kChunk, kSegments, kSegments - 1, kValueBlocks);
    const int value = place.rest * kBlockV;
    const kgen::wkv::Span span{place.head / H, 0, T};
    const i64 h = place.head % H;
    const auto k_steps = step_rows(k, span, h);
    const i64 part = place.head * (kSegments - 1) + place.segment;

    // 2. Chunk by chunk: S = diag(d) S + k^T v from S = 0; one block per segment writes the decays.
    const kgen::RecurrenceRows<Value> rows{
        k_steps, k_steps, step_rows(v, span, h).from(value), {}, place.first, place.end,
        kgen::min(kV - value, kBlockV), 1.0f, 1.0f};
    kgen::RecurrenceStates states{};
    states.final_state = segment_states + part * kK * kV + value;
    states.final_key_stride = kV;
    states.final_value_stride = 1;
    if (place.rest == 0) states.final_key_sum = segment_decays + part * kK;
    Loop(rows, states, {step_rows(w, span, h), nullptr}).sum_segment();
}

// By one block: y of a segment, for kBlockV value features of a head.
KGEN_DEVICE void forward(i64 H, i64 T, const Offset* cu_seqlens, Rows<const Value> r,
                         Rows<const Value> k, Rows<const Value> v, Rows<const W> w, const U* u,
                         const float* initial_state, const float* segment_states,
                         const float* segment_decays, Rows<Value> y, float* final_state,
                         float scale) {
    // 1. The block's sequence, head, segment and value features.
    const i64 sequence = blockIdx.x / kValueBlocks / kSegments / H;
    const kgen::wkv::Span span = kgen::wkv::span_of(cu_seqlens, sequence, T);
    const kgen::BlockSegment place(span.steps, kChunk, kSegments, kSegments, kValueBlocks);
    const int value = place.rest * kBlockV;
    const i64 head = place.head, h = head % H, state = head * kK * kV + value;

    const kgen::RecurrenceRows<Value> rows{
        step_rows(r, span, h), step_rows(k, span, h),
        step_rows(v, span, h).from(value), step_rows(y, span, h).from(value),
        place.first, place.end, kgen::min(kV - value, kBlockV), scale, 1.0f};

    // 2. The segment's initial state: that of the sequence, decayed, and what earlier segments add.
    kgen::RecurrenceStates states{};
    if (initial_state != nullptr) states.initial_state = initial_state + state;
    states.initial_key_stride = states.final_key_stride = kV;
    states.initial_value_stride = states.final_value_stride = 1;
    states.segments = place.segment;
    states.segment_sums = segment_states + head * (kSegments - 1) * kK * kV + value;
    states.segment_key_sums = segment_decays + head * (kSegments - 1) * kK;
    states.segment_stride = kK * kV;
    states.final_factor = 1.0f;
    if (final_state != nullptr && place.segment == kSegments - 1)
        states.final_state = final_state + state;

    // 3. Chunk by chunk: y from the state (inter-chunk) and from the scores r k^T (intra-chunk), then
    // the state after the chunk. The last segment writes the final state.
    Loop(rows, states, {step_rows(w, span, h), u + h * kK}).run();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
wkv_segment_states(const Value* __restrict__ k,         // [B, T, H, K]
                   const Value* __restrict__ v,         // [B, T, H, V]
                   const W* __restrict__ w,             // [B, T, H, K], or [H, K]
                   float* __restrict__ segment_states,  // [B * H, segments - 1, K, V]
                   float* __restrict__ segment_decays,  // [B * H, segments - 1, K]
                   i64 H, i64 T, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
                   i64 v_stride_T,
                   i64 v_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H) {
    sum_segment(H, T, {k, k_stride_B, k_stride_T, k_stride_H},
                {v, v_stride_B, v_stride_T, v_stride_H},
                {w, w_stride_B, w_stride_T, w_stride_H},
                segment_states, segment_decays);
}

KGEN_EXPORT(wkv_segment_states);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, kMinBlocks)
wkv_forward(const Value* __restrict__ r,               // [B, T, H, K]
            const Value* __restrict__ k,               // [B, T, H, K]
            const Value* __restrict__ v,               // [B, T, H, V]
            const W* __restrict__ w,                   // [B, T, H, K], or [H, K]
            const U* __restrict__ u,                   // [H, K]
            const float* __restrict__ initial_state,   // [N, H, K, V] or null
            const Offset* __restrict__ cu_seqlens,     // [N + 1] or null
            const float* __restrict__ segment_states,  // [B * H, segments - 1, K, V]
            const float* __restrict__ segment_decays,  // [B * H, segments - 1, K]
            Value* __restrict__ y,                     // [B, T, H, V]
            float* __restrict__ final_state,           // [N, H, K, V] or null
            i64 H, i64 T, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
            i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
            i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
            i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    forward(H, T, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
            {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
            {w, w_stride_B, w_stride_T, w_stride_H},
            u, initial_state, segment_states, segment_decays,
            {y, y_stride_B, y_stride_T, y_stride_H}, final_state, scale);
}

KGEN_EXPORT(wkv_forward);
