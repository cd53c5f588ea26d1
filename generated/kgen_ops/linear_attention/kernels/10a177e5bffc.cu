// digest: 10a177e5bffc
// Rendered by kgen from templates/linear_attention/backward_scanned.cu.jinja
// config: scanned(chunk=16, value_tiles=1, value_warps=4, key_warps=1, stages=4, copy=16, segments=16, min_blocks=3, scan_vec=1, overlap=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention backward on tensor cores for few heads: many short segments. gq walks with the
// state S, gk and gv backwards in time with its gradient G. One kernel sums what each segment adds
// to S and G, one turns the sums into S and G before the segments, and in the last each block reads
// one of them and walks its few chunks. gk takes G transposed: it needs no sums of its own.
#include "kgen/chunk_place.cuh"
#include "kgen/chunk_walk.cuh"
#include "kgen/dependent_launch.cuh"
#include "kgen/segment_scan.cuh"

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
constexpr int kValueWarps = 4;  // warps side by side along the value features
constexpr int kKeyWarps = 1;      // warps that share these features' keys
constexpr int kStages = 4;           // chunks in shared memory
constexpr int kCopy = 16;               // bytes that one copy moves
constexpr int kSegments = 16;       // blocks in a row along the steps
constexpr int kMinBlocks = 3;    // blocks per SM that registers leave room for
constexpr int kScanWidth = 1;      // values of a state per thread of the scan

static_assert(!kgen::kPresent<kgen::none>, "these walks know no norm");

// A given gradient of the last state is not scaled, so that the sum it starts must be: then q and
// gout are scaled on their way into it, else the outputs are.
constexpr bool kScaled = kgen::kPresent<FinalState>;
constexpr int kParts = kSegments - 1;  // nobody needs the sum of the last segment
constexpr int kScanThreads = 128;

// gq and gk have the features of k as values, gv those of v, and so have the sums.
template <int Keys, int Values>
using WalkOf = kgen::ChunkWalk<T, Product, Keys, Values, kChunk, kValueTiles, kValueWarps,
                               kKeyWarps, kStages, kCopy, false, false, kScaled>;
using KeyWalk = WalkOf<kM, kE>;
using ValueWalk = WalkOf<kE, kM>;

constexpr int kSlice = KeyWalk::kSlice;
constexpr int kKeySlices = (kE + kSlice - 1) / kSlice;
constexpr int kValueSlices = (kM + kSlice - 1) / kSlice;

// The rows of one head, backwards in time for a walk that is.
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
extern "C" __global__ void __launch_bounds__(ValueWalk::kThreads, kMinBlocks)
linear_attention_backward_sums(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    float* __restrict__ state_parts,     // [B * H, segments - 1, E, M]
    float* __restrict__ gradient_parts,  // [B * H, segments - 1, E, M]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    kgen::let_next_kernel_start();
    const kgen::WalkPlace place(steps, kChunk, kSegments, kParts, 2 * kValueSlices);
    const bool of_state = place.rest < kValueSlices;
    const int value = place.rest % kValueSlices * kSlice;
    const kgen::i64 head = place.head;

    kgen::WalkRows<T> rows{};
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
    rows.values = kgen::min(kM - value, kSlice);
    rows.value_factor = kScaled && !of_state ? scale : 1.0f;

    kgen::WalkStates states{};
    states.end = (of_state ? state_parts : gradient_parts) +
                 (head * kParts + place.segment) * kE * kM + value;
    states.end_key_stride = kM;
    states.end_value_stride = 1;
    ValueWalk(rows, states).sum();
}

KGEN_EXPORT(linear_attention_backward_sums);

// In place: the sums become S and G before the segments behind them, each in its walk's direction.
extern "C" __global__ void __launch_bounds__(kScanThreads)
linear_attention_backward_scan(
    const InitialState* __restrict__ initial_state,  // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,     // [B, H, E, M]
    float* __restrict__ state_parts,                 // [B * H, segments - 1, E, M]
    float* __restrict__ gradient_parts,              // [B * H, segments - 1, E, M]
    kgen::i64 B, kgen::i64 H) {
    kgen::let_next_kernel_start();
    const kgen::i64 heads = B * H;
    const kgen::i64 index = static_cast<kgen::i64>(blockIdx.x) * kScanThreads + kgen::thread_rank();
    const kgen::i64 of_states = heads * (kE * kM / kScanWidth);  // threads
    const bool of_state = index < of_states;
    kgen::wait_for_earlier_kernel(state_parts, gradient_parts);
    kgen::scan_states<kParts, kScanWidth, kE * kM>(
        of_state ? state_parts : gradient_parts,
        of_state ? kgen::floats_at(initial_state, 0) : kgen::floats_at(gfinal_state, 0), heads,
        of_state ? index : index - of_states);
}

KGEN_EXPORT(linear_attention_backward_scan);

extern "C" __global__ void __launch_bounds__(KeyWalk::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,    // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,       // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,    // [B, H, E]
    const float* __restrict__ state_before,            // [B * H, segments - 1, E, M]
    const float* __restrict__ gradient_before,         // [B * H, segments - 1, E, M]
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
    const kgen::WalkPlace place(steps, kChunk, kSegments, kSegments, 2 * kKeySlices + kValueSlices);
    const bool of_q = place.rest < kKeySlices;
    const bool of_v = place.rest >= 2 * kKeySlices;
    const int value = (of_v ? place.rest - 2 * kKeySlices : place.rest % kKeySlices) * kSlice;
    const bool scaled = kScaled && !of_q;
    const kgen::i64 head = place.head;
    const bool last = place.segment == kSegments - 1;

    Sources from{rows_of(gout, head, H, {gout_stride_B, gout_stride_H, gout_stride_T}),
                 rows_of(q, head, H, {q_stride_B, q_stride_H, q_stride_T}),
                 rows_of(k, head, H, {k_stride_B, k_stride_H, k_stride_T}),
                 rows_of(v, head, H, {v_stride_B, v_stride_H, v_stride_T})};
    if (!of_q) from = from.reversed(steps);

    // 1. What goes through the walk.
    kgen::WalkRows<T> rows{};
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
    rows.values = kgen::min((of_v ? kM : kE) - value, kSlice);
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;

    // 2. The state before it: as [E, M] for gv, transposed for gq and gk.
    kgen::wait_for_earlier_kernel(state_before, gradient_before);
    kgen::WalkStates states{};
    states.state = kgen::state_before<kParts, kE * kM>(
        of_q ? state_before : gradient_before,
        of_q ? kgen::floats_at(initial_state, 0) : kgen::floats_at(gfinal_state, 0), head,
        place.segment);
    if (states.state != nullptr) states.state += of_v ? value : value * kM;
    states.key_stride = states.end_key_stride = of_v ? kM : 1;
    states.value_stride = states.end_value_stride = of_v ? 1 : kM;
    states.end_factor = scaled ? 1.0f : scale;

    // 3. The gradients of what came before all steps.
    if (last && of_v) states.end = kgen::floats_at(ginitial_state, head * kE * kM + value);
    if (!of_q && !of_v) {
        states.bias = kgen::floats_at(gfinal_key_sum, head * kE + value);
        // Without a norm the sum of keys has no other use than to be returned.
        float* target = kgen::floats_at(ginitial_key_sum, head * kE + value);
        if (target != nullptr && last)
            for (int i = kgen::thread_rank(); i < rows.values; i += KeyWalk::kThreads)
                target[i] = states.bias != nullptr ? states.bias[i] : 0.0f;
    }

    // One body for all walks of one shape: what runs on an SM at the same time is then the same code.
    if (kE == kM || !of_v) {
        KeyWalk(rows, states).walk();
    } else {
        ValueWalk(rows, states).walk();
    }
}

KGEN_EXPORT(linear_attention_backward);
