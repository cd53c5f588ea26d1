// digest: ca30841e25d4
// Rendered by kgen from templates/linear_attention/backward_chunk_scan.cu.jinja
// config: chunk_scan(chunk=16, value_tiles=1, value_warps=4, key_warps=1, stages=4, copy_bytes=16, segments=16, min_blocks=3, scan_vec=1, overlap=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, chunk_scan: tensor cores, for few heads, with many short segments. gq is a recurrence
// with the state S, gk and gv are recurrences backward in time with its gradient G. Three kernels:
//
//     sums      what each segment adds to S and to G
//     scan      the sums become S and G before the segments (segment_scan.cuh)
//     backward  each CTA reads S or G before its segment and loops over the chunks (chunk_loop.cuh)
//
// gq and gk read S and G transposed, so that gk needs no sums of its own.
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/chunk_loop.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/chunked/segment_scan.cuh"

namespace {

using T = kgen::bf16;
using Product = kgen::bf16;
using InitialState = kgen::none;
using InitialKeySum = kgen::none;
using FinalState = kgen::none;
using FinalKeySum = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kChunk = 16;             // steps
constexpr int kValueTiles = 1;  // fragments of 16 value features per warp
constexpr int kValueWarps = 4;  // warps of a CTA along the value features
constexpr int kKeyWarps = 1;      // warps of a CTA along the keys, for the same value features
constexpr int kStages = 4;           // chunks in the shared-memory ring
constexpr int kCopy = 16;         // bytes of one cp.async
constexpr int kSegments = 16;       // of the steps of a head, a CTA each
constexpr int kMinBlocks = 3;    // CTAs per SM that __launch_bounds__ reserves registers for
constexpr int kScanVec = 1;        // elements of a state per thread of the scan

static_assert(!kgen::kPresent<kgen::none>, "the kernel has no code for a norm");

// The gradient of the final state is not multiplied by scale, but the sum that starts from it is. If it is given,
// scale multiplies what each chunk adds to the sum; otherwise it multiplies the outputs.
constexpr bool kScaled = kgen::kPresent<FinalState>;
constexpr int kSums = kSegments - 1;  // the sum of the last segment is not needed
constexpr int kScanThreads = 128;

// gq and gk have the features of k as value features; gv and the sums have the features of v.
template <int Keys, int Values>
using LoopOf = kgen::ChunkLoop<T, Product, Keys, Values, kChunk, kValueTiles, kValueWarps,
                               kKeyWarps, kStages, kCopy, false, false, kScaled,
                               kgen::NoDecayRows, kgen::NoNormSplitState, kgen::kPresent<InitialState>>;
using KeyLoop = LoopOf<kM, kE>;
using ValueLoop = LoopOf<kE, kM>;

constexpr int kBlockV = KeyLoop::kBlockV;
constexpr int kKeyBlocks = (kE + kBlockV - 1) / kBlockV;
constexpr int kValueSumBlocks = (kM + kBlockV - 1) / kBlockV;

// The rows of one head.
struct Sources {
    kgen::StepRows<const T> gout, q, k, v;

    KGEN_DEVICE Sources reversed(kgen::i64 steps) const {
        return {gout.reversed(steps), q.reversed(steps), k.reversed(steps), v.reversed(steps)};
    }
};

// Strides of B, H and T of a tensor.
struct Strides {
    kgen::i64 batch, head, step;
};

template <class Value>
KGEN_DEVICE kgen::StepRows<Value> rows_of(Value* tensor, kgen::i64 head, kgen::i64 heads,
                                          const Strides& of) {
    return kgen::head_rows(tensor, head, heads, of.batch, of.head, of.step);
}

}  // namespace

// Sums over each segment but the last: of k v^T forward in time (S), and of q gout^T backward (G).
extern "C" __global__ void __launch_bounds__(ValueLoop::kThreads, kMinBlocks)
linear_attention_backward_sums(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    float* __restrict__ state_sums,     // [B * H, segments - 1, E, M]
    float* __restrict__ gradient_sums,  // [B * H, segments - 1, E, M]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    kgen::griddepcontrol_launch_dependents();
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSums, 2 * kValueSumBlocks);
    const bool of_state = place.rest < kValueSumBlocks;
    const int value = place.rest % kValueSumBlocks * kBlockV;
    const kgen::i64 head = place.head;

    kgen::RecurrenceRows<T> rows{};
    if (of_state) {
        rows.b = rows_of(k, head, H, {k_stride_B, k_stride_H, k_stride_T});
        rows.v = rows_of(v, head, H, {v_stride_B, v_stride_H, v_stride_T}).from(value);
    } else {
        rows.b = rows_of(q, head, H, {q_stride_B, q_stride_H, q_stride_T}).reversed(steps);
        rows.v = rows_of(gout, head, H, {gout_stride_B, gout_stride_H, gout_stride_T})
                     .from(value).reversed(steps);
    }
    rows.a = rows.b;
    rows.first = place.first;
    rows.end = place.end;
    rows.values = kgen::min(kM - value, kBlockV);
    rows.value_factor = kScaled && !of_state ? scale : 1.0f;

    kgen::RecurrenceStates states{};
    states.final_state = (of_state ? state_sums : gradient_sums) +
                 (head * kSums + place.segment) * kE * kM + value;
    states.final_key_stride = kM;
    states.final_value_stride = 1;
    ValueLoop(rows, states).sum_segment();
}

KGEN_EXPORT(linear_attention_backward_sums);

// In place: sum i becomes S (or G) before segment i + 1.
extern "C" __global__ void __launch_bounds__(kScanThreads)
linear_attention_backward_scan(
    const InitialState* __restrict__ initial_state,  // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,     // [B, H, E, M]
    float* __restrict__ state_sums,                 // [B * H, segments - 1, E, M]
    float* __restrict__ gradient_sums,              // [B * H, segments - 1, E, M]
    kgen::i64 B, kgen::i64 H) {
    kgen::griddepcontrol_launch_dependents();
    const kgen::i64 heads = B * H;
    const kgen::i64 index = static_cast<kgen::i64>(blockIdx.x) * kScanThreads + kgen::thread_rank();
    const kgen::i64 of_states = heads * (kE * kM / kScanVec);  // threads
    const bool of_state = index < of_states;
    kgen::griddepcontrol_wait(state_sums, gradient_sums);
    kgen::states_before_segments<kSums, kScanVec, kE * kM>(
        of_state ? state_sums : gradient_sums,
        of_state ? kgen::floats_at(initial_state, 0) : kgen::floats_at(gfinal_state, 0), heads,
        of_state ? index : index - of_states);
}

KGEN_EXPORT(linear_attention_backward_scan);

extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,    // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,       // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,    // [B, H, E]
    const float* __restrict__ state_sums,            // [B * H, segments - 1, E, M]
    const float* __restrict__ gradient_sums,         // [B * H, segments - 1, E, M]
    T* __restrict__ gq,               // [B, H, T, E]
    T* __restrict__ gk,               // [B, H, T, E]
    T* __restrict__ gv,               // [B, H, T, M]
    InitialState* __restrict__ ginitial_state,      // [B, H, E, M]
    InitialKeySum* __restrict__ ginitial_key_sum,   // [B, H, E]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
    kgen::i64 gq_stride_B, kgen::i64 gq_stride_H, kgen::i64 gq_stride_T,
    kgen::i64 gk_stride_B, kgen::i64 gk_stride_H, kgen::i64 gk_stride_T,
    kgen::i64 gv_stride_B, kgen::i64 gv_stride_H, kgen::i64 gv_stride_T, float scale) {
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSegments, 2 * kKeyBlocks + kValueSumBlocks);
    const bool of_q = place.rest < kKeyBlocks;
    const bool of_v = place.rest >= 2 * kKeyBlocks;
    const int value = (of_v ? place.rest - 2 * kKeyBlocks : place.rest % kKeyBlocks) * kBlockV;
    const bool scaled = kScaled && !of_q;
    const kgen::i64 head = place.head;
    const bool last = place.segment == kSegments - 1;

    Sources from{rows_of(gout, head, H, {gout_stride_B, gout_stride_H, gout_stride_T}),
                 rows_of(q, head, H, {q_stride_B, q_stride_H, q_stride_T}),
                 rows_of(k, head, H, {k_stride_B, k_stride_H, k_stride_T}),
                 rows_of(v, head, H, {v_stride_B, v_stride_H, v_stride_T})};
    if (!of_q) from = from.reversed(steps);

    // 1. The rows a, b, v of the gradient's recurrence.
    kgen::RecurrenceRows<T> rows{};
    rows.a = of_q ? from.gout : of_v ? from.k : from.v;
    rows.b = of_q ? from.v : of_v ? from.q : from.gout;
    rows.v = (of_q ? from.k : of_v ? from.gout : from.q).from(value);
    if (of_q) {
        rows.out = rows_of(gq, head, H, {gq_stride_B, gq_stride_H, gq_stride_T});
    } else if (of_v) {
        rows.out = rows_of(gv, head, H, {gv_stride_B, gv_stride_H, gv_stride_T}).reversed(steps);
    } else {
        rows.out = rows_of(gk, head, H, {gk_stride_B, gk_stride_H, gk_stride_T}).reversed(steps);
    }
    rows.out = rows.out.from(value);
    rows.first = place.first;
    rows.end = place.end;
    rows.values = kgen::min((of_v ? kM : kE) - value, kBlockV);
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;

    // 2. The state before the segment: as [E, M] for gv, transposed for gq and gk.
    kgen::griddepcontrol_wait(state_sums, gradient_sums);
    kgen::RecurrenceStates states{};
    states.initial_state = kgen::state_before_segment<kSums, kE * kM>(
        of_q ? state_sums : gradient_sums,
        of_q ? kgen::floats_at(initial_state, 0) : kgen::floats_at(gfinal_state, 0), head,
        place.segment);
    if (states.initial_state != nullptr) states.initial_state += of_v ? value : value * kM;
    states.initial_key_stride = states.final_key_stride = of_v ? kM : 1;
    states.initial_value_stride = states.final_value_stride = of_v ? 1 : kM;
    states.final_factor = scaled ? 1.0f : scale;

    // 3. The gradients of the initial state and of the initial key sum.
    if (last && of_v) states.final_state = kgen::floats_at(ginitial_state, head * kE * kM + value);
    if (!of_q && !of_v) {
        states.bias = kgen::floats_at(gfinal_key_sum, head * kE + value);
        // Without a norm the key sum is only returned: its gradient passes through unchanged.
        float* target = kgen::floats_at(ginitial_key_sum, head * kE + value);
        if (target != nullptr && last)
            for (int i = kgen::thread_rank(); i < rows.values; i += KeyLoop::kThreads)
                target[i] = states.bias != nullptr ? states.bias[i] : 0.0f;
    }

    // 4. The chunk loop. One instantiation for all loops of one shape, so that the CTAs of an SM run the same code.
    if (kE == kM || !of_v) {
        KeyLoop(rows, states).run();
    } else {
        ValueLoop(rows, states).run();
    }
}

KGEN_EXPORT(linear_attention_backward);
