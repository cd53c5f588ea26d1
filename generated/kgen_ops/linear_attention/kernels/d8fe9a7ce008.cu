// digest: d8fe9a7ce008
// Rendered by kgen from templates/linear_attention/backward_chunked.cu.jinja
// config: chunked(chunk=16, value_tiles=1, value_warps=4, key_warps=1, stages=4, copy=16, segments=1, min_blocks=1)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention backward on tensor cores. Each gradient is a walk like the forward pass's: gq of
// gout, v, k, and backwards in time gk of v, gout, q and gv of k, q, gout. The walks of a head are
// neighbouring blocks, so that what one reads another finds in L2. With segments, a first kernel
// sums each segment's outer products of each walk.
#include "kgen/chunk_place.cuh"
#include "kgen/chunk_walk.cuh"

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
constexpr int kSegments = 1;       // blocks in a row along the steps
constexpr int kMinBlocks = 1;    // blocks per SM that registers leave room for

static_assert(!kgen::kPresent<kgen::none>, "these walks know no norm");

// A given gradient of the last state is not scaled, so that the sum it starts must be: then q and
// gout are scaled on their way into it, else the outputs are.
constexpr bool kScaled = kgen::kPresent<FinalState>;

// gq and gk have the features of k as values, gv those of v.
template <int Keys, int Values>
using WalkOf = kgen::ChunkWalk<T, Product, Keys, Values, kChunk, kValueTiles, kValueWarps,
                               kKeyWarps, kStages, kCopy, false, false, kScaled>;
using KeyWalk = WalkOf<kM, kE>;
using ValueWalk = WalkOf<kE, kM>;

constexpr int kSlice = KeyWalk::kSlice;
constexpr int kKeySlices = (kE + kSlice - 1) / kSlice;
constexpr int kSlices = 2 * kKeySlices + (kM + kSlice - 1) / kSlice;  // of all three walks

enum class Gradient { of_q, of_k, of_v };

// What a block's walk is of, and from which value feature on.
struct Task {
    Gradient gradient;
    int value;

    KGEN_DEVICE explicit Task(int rest) {
        gradient = rest < kKeySlices       ? Gradient::of_q
                   : rest < 2 * kKeySlices ? Gradient::of_k
                                           : Gradient::of_v;
        value = rest % kKeySlices * kSlice;
        if (gradient == Gradient::of_v) value = (rest - 2 * kKeySlices) * kSlice;
    }

    KGEN_DEVICE bool is(Gradient other) const { return gradient == other; }
};

// Rows of a task's walk; `gout`, `q`, `k` and `v` are those of the head.
struct Sources {
    kgen::StepRows<const T> gout, q, k, v;
};

KGEN_DEVICE kgen::WalkRows<T> rows_of(const Task& task, const Sources& from,
                                      const kgen::WalkPlace& place, kgen::i64 steps) {
    kgen::WalkRows<T> rows{};
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
    rows.values = kgen::min((task.is(Gradient::of_v) ? kM : kE) - task.value, kSlice);
    return rows;
}

template <class Walk, bool WithOutputs>
KGEN_DEVICE void run_as(const kgen::WalkRows<T>& rows, const kgen::WalkStates& states) {
    if constexpr (WithOutputs) {
        Walk(rows, states).walk();
    } else {
        Walk(rows, states).sum();
    }
}

// One body for all walks of one shape: what runs on an SM at the same time is then the same code.
template <bool WithOutputs>
KGEN_DEVICE void run(const Task& task, const kgen::WalkRows<T>& rows,
                     const kgen::WalkStates& states) {
    if (kE == kM || !task.is(Gradient::of_v)) {
        run_as<KeyWalk, WithOutputs>(rows, states);
    } else {
        run_as<ValueWalk, WithOutputs>(rows, states);
    }
}

}  // namespace

// Sums of the outer products of each walk over each of its segments but the last.
extern "C" __global__ void __launch_bounds__(KeyWalk::kThreads, kMinBlocks)
linear_attention_backward_segments(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    float* __restrict__ parts,   // [B * H, 3, segments - 1, keys, values] of each walk
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    const kgen::WalkPlace place(steps, kChunk, kSegments, kSegments - 1, kSlices);
    const Task task(place.rest);
    const kgen::i64 head = place.head;
    const Sources from{kgen::head_rows(gout, head, H, gout_stride_B, gout_stride_H, gout_stride_T),
                       kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
                       kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
                       kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T)};
    kgen::WalkRows<T> rows = rows_of(task, from, place, steps);
    rows.value_factor = kScaled && !task.is(Gradient::of_q) ? scale : 1.0f;

    kgen::WalkStates states{};
    states.end = parts + ((head * 3 + static_cast<int>(task.gradient)) * (kSegments - 1) +
                          place.segment) * kE * kM + task.value;
    states.end_key_stride = task.is(Gradient::of_v) ? kM : kE;
    states.end_value_stride = 1;
    run<false>(task, rows, states);
}

KGEN_EXPORT(linear_attention_backward_segments);

extern "C" __global__ void __launch_bounds__(KeyWalk::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,    // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,       // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,    // [B, H, E]
    const float* __restrict__ parts,  // [B * H, 3, segments - 1, keys, values] of each walk
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
    const kgen::WalkPlace place(steps, kChunk, kSegments, kSegments, kSlices);
    const Task task(place.rest);
    const kgen::i64 head = place.head;
    const bool last = place.segment == kSegments - 1;
    const bool scaled = kScaled && !task.is(Gradient::of_q);
    const Sources from{kgen::head_rows(gout, head, H, gout_stride_B, gout_stride_H, gout_stride_T),
                       kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
                       kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
                       kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T)};
    kgen::WalkRows<T> rows = rows_of(task, from, place, steps);
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;

    kgen::WalkStates states{};
    const kgen::i64 state = head * kE * kM;
    states.count = place.segment;
    states.parts = parts + (head * 3 + static_cast<int>(task.gradient)) * (kSegments - 1) * kE * kM +
                   task.value;
    states.part_stride = kE * kM;
    if (task.is(Gradient::of_v)) {
        rows.out = kgen::head_rows(gv, head, H, gv_stride_B, gv_stride_H, gv_stride_T);
        states.state = kgen::floats_at(gfinal_state, state + task.value);
        states.key_stride = states.end_key_stride = kM;
        states.value_stride = states.end_value_stride = 1;
        states.end_factor = scaled ? 1.0f : scale;
        if (last) states.end = kgen::floats_at(ginitial_state, state + task.value);
    } else {
        const kgen::i64 column = state + static_cast<kgen::i64>(task.value) * kM;
        states.key_stride = 1;
        states.value_stride = kM;
        if (task.is(Gradient::of_q)) {
            rows.out = kgen::head_rows(gq, head, H, gq_stride_B, gq_stride_H, gq_stride_T);
            states.state = kgen::floats_at(initial_state, column);
        } else {
            rows.out = kgen::head_rows(gk, head, H, gk_stride_B, gk_stride_H, gk_stride_T);
            states.state = kgen::floats_at(gfinal_state, column);
            states.bias = kgen::floats_at(gfinal_key_sum, head * kE + task.value);
            // Without a norm the sum of keys has no other use than to be returned.
            float* target = kgen::floats_at(ginitial_key_sum, head * kE + task.value);
            if (target != nullptr && last)
                for (int i = kgen::thread_rank(); i < rows.values; i += KeyWalk::kThreads)
                    target[i] = states.bias != nullptr ? states.bias[i] : 0.0f;
        }
    }
    rows.out = rows.out.from(task.value);
    if (!task.is(Gradient::of_q)) rows.out = rows.out.reversed(steps);
    run<true>(task, rows, states);
}

KGEN_EXPORT(linear_attention_backward);
