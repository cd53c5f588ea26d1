// digest: 68d4bd565731
// Rendered by kgen from templates/linear_attention/backward_chunk_loop.cu.jinja
// config: chunk_loop(chunk=16, value_tiles=1, value_warps=4, key_warps=1, stages=5, copy_bytes=16, segments=1, min_blocks=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, chunk_loop: tensor cores, from sm_80 on. Each gradient is a recurrence like the forward
// pass's, out_t = a_t S_t with S_t = S_{t-1} + b_t v_t^T (chunk_loop.cuh):
//
//     gq: a, b, v = gout, v, k             forward in time
//     gk: a, b, v = v, gout, q             backward in time
//     gv: a, b, v = k, q, gout             backward in time
//
// The CTAs of a head have consecutive indices, so that they find each other's rows in L2. With segments a first kernel
// sums b v^T of each segment of each recurrence, and a CTA of the second kernel starts from the sums of the segments
// before its own.
#include "kgen/chunked/sequence.cuh"
#include "kgen/chunked/chunk_loop.cuh"

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
constexpr int kStages = 5;           // chunks in the shared-memory ring
constexpr int kCopy = 16;         // bytes of one cp.async
constexpr int kSegments = 1;       // of the steps of a head, a CTA each
constexpr int kMinBlocks = 1;    // CTAs per SM that __launch_bounds__ reserves registers for

static_assert(!kgen::kPresent<kgen::none>, "the kernel has no code for a norm");

// The gradient of the final state is not multiplied by scale, but the sum that starts from it is. If it is given,
// scale multiplies what each chunk adds to the sum; otherwise it multiplies the outputs.
constexpr bool kScaled = kgen::kPresent<FinalState>;

// gq and gk have the features of k as value features, gv has the features of v.
template <int Keys, int Values>
using LoopOf = kgen::ChunkLoop<T, Product, Keys, Values, kChunk, kValueTiles, kValueWarps,
                               kKeyWarps, kStages, kCopy, false, false, kScaled,
                               kgen::NoDecayRows, kgen::NoNormSplitState, kgen::kPresent<InitialState>>;
using KeyLoop = LoopOf<kM, kE>;
using ValueLoop = LoopOf<kE, kM>;

constexpr int kBlockV = KeyLoop::kBlockV;
constexpr int kKeyBlocks = (kE + kBlockV - 1) / kBlockV;
constexpr int kValueBlocks = 2 * kKeyBlocks + (kM + kBlockV - 1) / kBlockV;  // of all three recurrences

enum class Gradient { of_q, of_k, of_v };

// The gradient that a CTA computes, and its first value feature.
struct Task {
    Gradient gradient;
    int value;

    KGEN_DEVICE explicit Task(int rest) {
        gradient = rest < kKeyBlocks       ? Gradient::of_q
                   : rest < 2 * kKeyBlocks ? Gradient::of_k
                                           : Gradient::of_v;
        value = rest % kKeyBlocks * kBlockV;
        if (gradient == Gradient::of_v) value = (rest - 2 * kKeyBlocks) * kBlockV;
    }

    KGEN_DEVICE bool is(Gradient other) const { return gradient == other; }
};

// Rows of the head's tensors.
struct Sources {
    kgen::StepRows<const T> gout, q, k, v;
};

KGEN_DEVICE kgen::RecurrenceRows<T> rows_of(const Task& task, const Sources& from,
                                      const kgen::BlockSegment& place, kgen::i64 steps) {
    kgen::RecurrenceRows<T> rows{};
    rows.a = task.is(Gradient::of_q) ? from.gout : task.is(Gradient::of_k) ? from.v : from.k;
    rows.b = task.is(Gradient::of_q) ? from.v : task.is(Gradient::of_k) ? from.gout : from.q;
    rows.v = task.is(Gradient::of_q) ? from.k : task.is(Gradient::of_k) ? from.q : from.gout;
    rows.v = rows.v.from(task.value);
    if (!task.is(Gradient::of_q)) {
        rows.a = rows.a.reversed(steps);
        rows.b = rows.b.reversed(steps);
        rows.v = rows.v.reversed(steps);
    }
    rows.first = place.first;
    rows.end = place.end;
    rows.values = kgen::min((task.is(Gradient::of_v) ? kM : kE) - task.value, kBlockV);
    return rows;
}

template <class Loop, bool WithOutputs>
KGEN_DEVICE void run_as(const kgen::RecurrenceRows<T>& rows, const kgen::RecurrenceStates& states) {
    if constexpr (WithOutputs) {
        Loop(rows, states).run();
    } else {
        Loop(rows, states).sum_segment();
    }
}

// One instantiation for all loops of one shape, so that the CTAs of an SM run the same code.
template <bool WithOutputs>
KGEN_DEVICE void run(const Task& task, const kgen::RecurrenceRows<T>& rows,
                     const kgen::RecurrenceStates& states) {
    if (kE == kM || !task.is(Gradient::of_v)) {
        run_as<KeyLoop, WithOutputs>(rows, states);
    } else {
        run_as<ValueLoop, WithOutputs>(rows, states);
    }
}

}  // namespace

// Sums of b v^T over each segment but the last, of each of the three recurrences.
extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, kMinBlocks)
linear_attention_backward_segments(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    float* __restrict__ segment_sums,   // [B * H, 3, segments - 1, keys, values] of each recurrence
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSegments - 1, kValueBlocks);
    const Task task(place.rest);
    const kgen::i64 head = place.head;
    const Sources from{kgen::head_rows(gout, head, H, gout_stride_B, gout_stride_H, gout_stride_T),
                       kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
                       kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
                       kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T)};
    kgen::RecurrenceRows<T> rows = rows_of(task, from, place, steps);
    rows.value_factor = kScaled && !task.is(Gradient::of_q) ? scale : 1.0f;

    kgen::RecurrenceStates states{};
    states.final_state = segment_sums + ((head * 3 + static_cast<int>(task.gradient)) * (kSegments - 1) +
                          place.segment) * kE * kM + task.value;
    states.final_key_stride = task.is(Gradient::of_v) ? kM : kE;
    states.final_value_stride = 1;
    run<false>(task, rows, states);
}

KGEN_EXPORT(linear_attention_backward_segments);

extern "C" __global__ void __launch_bounds__(KeyLoop::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,    // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,       // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,    // [B, H, E]
    const float* __restrict__ segment_sums,  // [B * H, 3, segments - 1, keys, values] of each recurrence
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
    const kgen::BlockSegment place(steps, kChunk, kSegments, kSegments, kValueBlocks);
    const Task task(place.rest);
    const kgen::i64 head = place.head;
    const bool last = place.segment == kSegments - 1;
    const bool scaled = kScaled && !task.is(Gradient::of_q);
    const Sources from{kgen::head_rows(gout, head, H, gout_stride_B, gout_stride_H, gout_stride_T),
                       kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
                       kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
                       kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T)};
    kgen::RecurrenceRows<T> rows = rows_of(task, from, place, steps);
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;

    kgen::RecurrenceStates states{};
    const kgen::i64 state = head * kE * kM;
    states.segments = place.segment;
    states.segment_sums = segment_sums + (head * 3 + static_cast<int>(task.gradient)) * (kSegments - 1) * kE * kM +
                   task.value;
    states.segment_stride = kE * kM;
    if (task.is(Gradient::of_v)) {
        rows.out = kgen::head_rows(gv, head, H, gv_stride_B, gv_stride_H, gv_stride_T);
        states.initial_state = kgen::floats_at(gfinal_state, state + task.value);
        states.initial_key_stride = states.final_key_stride = kM;
        states.initial_value_stride = states.final_value_stride = 1;
        states.final_factor = scaled ? 1.0f : scale;
        if (last) states.final_state = kgen::floats_at(ginitial_state, state + task.value);
    } else {
        const kgen::i64 column = state + static_cast<kgen::i64>(task.value) * kM;
        states.initial_key_stride = 1;
        states.initial_value_stride = kM;
        if (task.is(Gradient::of_q)) {
            rows.out = kgen::head_rows(gq, head, H, gq_stride_B, gq_stride_H, gq_stride_T);
            states.initial_state = kgen::floats_at(initial_state, column);
        } else {
            rows.out = kgen::head_rows(gk, head, H, gk_stride_B, gk_stride_H, gk_stride_T);
            states.initial_state = kgen::floats_at(gfinal_state, column);
            states.bias = kgen::floats_at(gfinal_key_sum, head * kE + task.value);
            // Without a norm the key sum is only returned: its gradient passes through unchanged.
            float* target = kgen::floats_at(ginitial_key_sum, head * kE + task.value);
            if (target != nullptr && last)
                for (int i = kgen::thread_rank(); i < rows.values; i += KeyLoop::kThreads)
                    target[i] = states.bias != nullptr ? states.bias[i] : 0.0f;
        }
    }
    rows.out = rows.out.from(task.value);
    if (!task.is(Gradient::of_q)) rows.out = rows.out.reversed(steps);
    run<true>(task, rows, states);
}

KGEN_EXPORT(linear_attention_backward);
