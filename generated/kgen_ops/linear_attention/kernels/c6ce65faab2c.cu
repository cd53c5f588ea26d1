// digest: c6ce65faab2c
// Rendered by kgen from templates/linear_attention/backward_parallel_chunks.cu.jinja
// config: parallel_chunks(chunk=64, step_tiles=1, slice=128, min_blocks=1, copy=16, state_keys=64, state_values=64, state_key_warps=2, state_value_warps=2, batch=64, stages=4, overlap=1)
// problem: E=128, M=128, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention backward on tensor cores for few heads: one kernel walks the steps for tiles of
// the state S and, backwards in time, of its gradient G, and leaves both before each chunk; in the
// other the chunks of all gradients are made at once, each by blocks of its own: gq reads S, gk and
// gv read G, gq and gk transposed.
#include "kgen/chunk_outputs.cuh"
#include "kgen/chunk_place.cuh"
#include "kgen/dependent_launch.cuh"
#include "kgen/state_walk.cuh"

namespace {

using T = kgen::bf16;
using InitialState = kgen::none;
using InitialKeySum = kgen::none;
using FinalState = kgen::none;
using FinalKeySum = kgen::none;

constexpr int kE = 128;
constexpr int kM = 128;
constexpr int kChunk = 64;                        // steps of a block of gradients
constexpr int kSlice = 128;                        // features of such a block
constexpr int kStepTiles = 1;                  // fragments of 16 steps of its warps
constexpr int kMinBlocks = 1;               // blocks per SM that registers leave room for
constexpr int kCopy = 16;                          // bytes that one copy moves
constexpr int kEarly = 1;                      // such blocks per SM that begin beside those of states
constexpr int kStateKeys = 64;               // features of a block of states
constexpr int kStateValues = 64;
constexpr int kStateKeyWarps = 2;      // its warps
constexpr int kStateValueWarps = 2;
constexpr int kBatch = 64;                        // steps per barrier there
constexpr int kStages = 4;                      // batches in shared memory

static_assert(!kgen::kPresent<kgen::none>, "these blocks know no norm");

// A given gradient of the last state is not scaled, so that what is added to it must be.
constexpr bool kScaled = kgen::kPresent<FinalState>;

using States = kgen::StateWalk<T, kE, kM, kStateKeys, kStateValues, kStateKeyWarps,
                               kStateValueWarps, kChunk, kBatch, kStages, kCopy>;
template <int Keys, int Values>
using OutputsOf =
    kgen::ChunkOutputs<T, Keys, Values, kChunk, kSlice, kStepTiles, kCopy, kScaled, kEarly>;
using KeyOutputs = OutputsOf<kM, kE>;    // gq and gk: the features of k
using ValueOutputs = OutputsOf<kE, kM>;  // gv

constexpr int kAllM = kgen::whole_fragments(kM);
constexpr int kStoredState = kgen::whole_fragments(kE) * kAllM;

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

// S before each chunk, from k v^T forward in time, and G, from q gout^T backward.
extern "C" __global__ void __launch_bounds__(States::kThreads, 1)
linear_attention_backward_states(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const InitialState* __restrict__ initial_state,  // [B, H, E, M]
    const FinalState* __restrict__ gfinal_state,     // [B, H, E, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,  // [B, H, E]
    T* __restrict__ states,     // [B * H, chunks, E, M], whole fragments
    T* __restrict__ gradients,  // [B * H, chunks, E, M]; chunks counted from the last step
    InitialState* __restrict__ ginitial_state,  // [B, H, E, M]
    InitialKeySum* __restrict__ ginitial_key_sum,  // [B, H, E]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    if constexpr (kEarly > 0) kgen::let_next_kernel_start();
    const int rest = static_cast<int>(blockIdx.x % (2 * States::kBlocks));
    const kgen::i64 head = blockIdx.x / (2 * States::kBlocks);
    const bool of_state = rest < States::kBlocks;
    const kgen::i64 stored = head * kgen::ceil_div(steps, kgen::i64{kChunk}) * kStoredState;
    const kgen::i64 whole = head * kE * kM;

    // 1. Without a norm the sum of keys has no other use than to be returned.
    float* key_sum = kgen::floats_at(ginitial_key_sum, head * kE);
    const float* given = kgen::floats_at(gfinal_key_sum, head * kE);
    if (key_sum != nullptr && rest == 0)
        for (int i = kgen::thread_rank(); i < kE; i += States::kThreads)
            key_sum[i] = given != nullptr ? given[i] : 0.0f;

    // 2. A tile of S or of G.
    kgen::StepRows<const T> b, values;
    kgen::StateEnds<T> ends{};
    if (of_state) {
        b = rows_of(k, head, H, {k_stride_B, k_stride_H, k_stride_T});
        values = rows_of(v, head, H, {v_stride_B, v_stride_H, v_stride_T});
        ends = {kgen::floats_at(initial_state, whole), states + stored, nullptr, 1.0f};
    } else {
        b = rows_of(q, head, H, {q_stride_B, q_stride_H, q_stride_T}).reversed(steps);
        values = rows_of(gout, head, H, {gout_stride_B, gout_stride_H, gout_stride_T})
                     .reversed(steps);
        ends = {kgen::floats_at(gfinal_state, whole), gradients + stored,
                kgen::floats_at(ginitial_state, whole), kScaled ? scale : 1.0f};
    }
    // Without a given gradient all of G is scaled by whoever reads it: here, for the last time.
    const float end_factor = kScaled ? 1.0f : scale;
    States(b, values, steps, ends, rest % States::kBlocks).walk(end_factor);
}

KGEN_EXPORT(linear_attention_backward_states);

extern "C" __global__ void __launch_bounds__(KeyOutputs::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,  // [B, H, E]
    const T* __restrict__ states,     // [B * H, chunks, E, M], whole fragments
    const T* __restrict__ gradients,  // [B * H, chunks, E, M]; chunks counted from the last step
    T* __restrict__ gq,               // [B, H, T, E]
    T* __restrict__ gk,               // [B, H, T, E]
    T* __restrict__ gv,               // [B, H, T, M]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
    kgen::i64 gq_stride_B, kgen::i64 gq_stride_H, kgen::i64 gq_stride_T,
    kgen::i64 gk_stride_B, kgen::i64 gk_stride_H, kgen::i64 gk_stride_T,
    kgen::i64 gv_stride_B, kgen::i64 gv_stride_H, kgen::i64 gv_stride_T, float scale) {
    constexpr int kKeySlices = KeyOutputs::kSlices;
    const int chunks = static_cast<int>(kgen::ceil_div(steps, kgen::i64{kChunk}));
    const kgen::WalkPlace place(steps, kChunk, chunks, chunks,
                                2 * kKeySlices + ValueOutputs::kSlices);
    const bool of_q = place.rest < kKeySlices;
    const bool of_v = place.rest >= 2 * kKeySlices;
    const int value = (of_v ? place.rest - 2 * kKeySlices : place.rest % kKeySlices) * kSlice;
    const bool scaled = kScaled && !of_q;
    const kgen::i64 head = place.head;

    kgen::StepRows<const T> of_gout =
        rows_of(gout, head, H, {gout_stride_B, gout_stride_H, gout_stride_T});
    kgen::StepRows<const T> of_keys = rows_of(k, head, H, {k_stride_B, k_stride_H, k_stride_T});
    kgen::StepRows<const T> of_values = rows_of(v, head, H, {v_stride_B, v_stride_H, v_stride_T});
    kgen::StepRows<const T> of_queries = rows_of(q, head, H, {q_stride_B, q_stride_H, q_stride_T});
    if (!of_q) {
        of_gout = of_gout.reversed(steps);
        of_keys = of_keys.reversed(steps);
        of_values = of_values.reversed(steps);
        of_queries = of_queries.reversed(steps);
    }

    // 1. What the outputs are made of.
    kgen::WalkRows<T> rows{};
    rows.a = of_q ? of_gout : of_v ? of_keys : of_values;
    rows.b = of_q ? of_values : of_v ? of_queries : of_gout;
    rows.v = (of_q ? of_keys : of_v ? of_gout : of_queries).from(value);
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

    // 2. The state before them.
    kgen::StoredState<T> state{};
    const bool given = of_q ? kgen::kPresent<InitialState> : kgen::kPresent<FinalState>;
    if (place.segment > 0 || given)
        state.stored = (of_q ? states : gradients) +
                       (head * chunks + place.segment) * kStoredState + value * (of_v ? 1 : kAllM);
    state.row_stride = kAllM;
    state.transposed = !of_v;

    if (!of_q && !of_v) state.bias = kgen::floats_at(gfinal_key_sum, head * kE + value);

    // One body for all gradients of one shape: what runs on an SM at the same time is then the same code.
    if (kE == kM || !of_v) {
        KeyOutputs(rows, state).run();
    } else {
        ValueOutputs(rows, state).run();
    }
}

KGEN_EXPORT(linear_attention_backward);
