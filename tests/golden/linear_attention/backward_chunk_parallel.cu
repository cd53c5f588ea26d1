// Rendered by kgen from templates/linear_attention/backward_chunk_parallel.cu.jinja
// config: chunk_parallel(chunk=32, step_tiles=1, block_v=16, min_blocks=2, copy_bytes=16, state_keys=64, state_values=64, state_key_warps=2, state_value_warps=2, batch=32, stages=4)
// problem: E=64, M=64, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, chunk_parallel: tensor cores, bf16, for few heads. The first kernel loops over the steps
// for tiles of the state S and, backward in time, of its gradient G, and stores both before each chunk
// (chunk_states.cuh). In the second kernel every chunk of every gradient has its own CTAs (chunk_outputs.cuh): gq reads
// S, gk and gv read G; gq and gk read it transposed.
#include "kgen/chunked/chunk_outputs.cuh"
#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/pdl.cuh"
#include "kgen/chunked/chunk_states.cuh"

namespace {

using T = kgen::bf16;
using InitialState = kgen::none;
using InitialKeySum = kgen::none;
using FinalState = kgen::none;
using FinalKeySum = kgen::none;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kChunk = 32;                    // steps of a CTA of the gradients
constexpr int kBlockV = 16;                 // features of such a CTA
constexpr int kStepTiles = 1;           // fragments of 16 steps per warp
constexpr int kMinBlocks = 2;           // CTAs per SM that __launch_bounds__ reserves registers for
constexpr int kCopy = 16;                // bytes of one cp.async
constexpr int kEarly = 0;                  // such CTAs per SM that launch while those of the states still run
constexpr int kStateKeys = 64;           // keys of a CTA of the states
constexpr int kStateValues = 64;
constexpr int kStateKeyWarps = 2;  // its warps
constexpr int kStateValueWarps = 2;
constexpr int kBatch = 32;                    // steps per barrier of the states
constexpr int kStages = 4;                  // batches in the shared-memory ring

static_assert(!kgen::kPresent<kgen::none>, "the kernel has no code for a norm");

// The gradient of the final state is not multiplied by scale. If it is given, scale multiplies what is added to it.
constexpr bool kScaled = kgen::kPresent<FinalState>;

using States = kgen::ChunkStates<T, kE, kM, kStateKeys, kStateValues, kStateKeyWarps,
                               kStateValueWarps, kChunk, kBatch, kStages, kCopy,
                               kgen::kPresent<InitialState>>;
template <int Keys, int Values>
using OutputsOf =
    kgen::ChunkOutputs<T, Keys, Values, kChunk, kBlockV, kStepTiles, kCopy, kScaled, kEarly>;
using KeyOutputs = OutputsOf<kM, kE>;    // gq and gk: the features of k
using ValueOutputs = OutputsOf<kE, kM>;  // gv

constexpr int kAllM = kgen::whole_fragments(kM);
constexpr int kStoredTerms = kgen::whole_fragments(kE) * kAllM, kStoredState = 2 * kStoredTerms;

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
    T* __restrict__ states,     // [B * H, chunks, 2, E, M], whole fragments; high and low terms
    T* __restrict__ gradients,  // [B * H, chunks, 2, E, M]; chunks counted from the last step
    InitialState* __restrict__ ginitial_state,  // [B, H, E, M]
    InitialKeySum* __restrict__ ginitial_key_sum,  // [B, H, E]
    kgen::i64 H, kgen::i64 steps,
    kgen::i64 gout_stride_B, kgen::i64 gout_stride_H, kgen::i64 gout_stride_T,
    kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
    kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
    kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T, float scale) {
    if constexpr (kEarly > 0) kgen::griddepcontrol_launch_dependents();
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

    // 2. The loop over the steps, for a tile of S or of G.
    kgen::StepRows<const T> b, values;
    kgen::ChunkStateTensors<T> ends{};
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
    // Without kScaled the second kernel multiplies G by scale; the gradient of the initial state is multiplied here.
    const float end_factor = kScaled ? 1.0f : scale;
    States(b, values, steps, ends, rest % States::kBlocks).run(end_factor);
}

KGEN_EXPORT(linear_attention_backward_states);

extern "C" __global__ void __launch_bounds__(KeyOutputs::kThreads, kMinBlocks)
linear_attention_backward(
    const T* __restrict__ gout,  // [B, H, T, M], rows gout_stride_T apart
    const T* __restrict__ q,     // [B, H, T, E]
    const T* __restrict__ k,     // [B, H, T, E]
    const T* __restrict__ v,     // [B, H, T, M]
    const FinalKeySum* __restrict__ gfinal_key_sum,  // [B, H, E]
    const T* __restrict__ states,     // [B * H, chunks, 2, E, M], whole fragments; high and low terms
    const T* __restrict__ gradients,  // [B * H, chunks, 2, E, M]; chunks counted from the last step
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
    constexpr int kKeyBlocks = KeyOutputs::kValueBlocks;
    const int chunks = static_cast<int>(kgen::ceil_div(steps, kgen::i64{kChunk}));
    const kgen::BlockSegment place(steps, kChunk, chunks, chunks,
                                2 * kKeyBlocks + ValueOutputs::kValueBlocks);
    const bool of_q = place.rest < kKeyBlocks;
    const bool of_v = place.rest >= 2 * kKeyBlocks;
    const int value = (of_v ? place.rest - 2 * kKeyBlocks : place.rest % kKeyBlocks) * kBlockV;
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

    // 1. The rows a, b, v of the gradient's recurrence.
    kgen::RecurrenceRows<T> rows{};
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
    rows.values = kgen::min((of_v ? kM : kE) - value, kBlockV);
    rows.value_factor = scaled ? scale : 1.0f;
    rows.out_factor = scaled ? 1.0f : scale;

    // 2. The state before the chunk.
    kgen::StateBeforeChunk<T> state{};
    const bool given = of_q ? kgen::kPresent<InitialState> : kgen::kPresent<FinalState>;
    if (place.segment > 0 || given)
        state.stored = (of_q ? states : gradients) +
                       (head * chunks + place.segment) * kStoredState + value * (of_v ? 1 : kAllM);
    state.low_terms = kStoredTerms;
    state.row_stride = kAllM;
    state.transposed = !of_v;

    if (!of_q && !of_v) state.bias = kgen::floats_at(gfinal_key_sum, head * kE + value);

    // 3. Outputs of the chunk. One instantiation for all gradients of one shape, so that the CTAs of an SM run the
    // same code.
    if (kE == kM || !of_v) {
        KeyOutputs(rows, state).run();
    } else {
        ValueOutputs(rows, state).run();
    }
}

KGEN_EXPORT(linear_attention_backward);
