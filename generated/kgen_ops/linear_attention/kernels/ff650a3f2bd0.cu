// digest: ff650a3f2bd0
// Rendered by kgen from templates/linear_attention/forward_parallel_chunks.cu.jinja
// config: parallel_chunks(chunk=128, step_tiles=1, slice=128, min_blocks=1, copy=16, state_keys=64, state_values=32, state_key_warps=4, state_value_warps=1, batch=128, stages=3, ahead=1, overlap=1)
// problem: E=128, M=128, dtype=bf16, product_dtype=bf16, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// Linear attention forward on tensor cores for few heads: one kernel walks the steps for tiles of the
// states alone and leaves the state before each chunk; in the other all chunks' outputs are made at
// once, each by blocks of its own.
#include "kgen/chunk_outputs.cuh"
#include "kgen/chunk_place.cuh"
#include "kgen/dependent_launch.cuh"
#include "kgen/state_walk.cuh"

namespace {

using T = kgen::bf16;
using InitialState = kgen::none;
using FinalState = kgen::none;

constexpr int kE = 128;
constexpr int kM = 128;
constexpr int kChunk = 128;                        // steps of a block of outputs
constexpr int kSlice = 128;                        // value features of such a block
constexpr int kStepTiles = 1;                  // fragments of 16 steps of its warps
constexpr int kMinBlocks = 1;               // blocks per SM that registers leave room for
constexpr int kCopy = 16;                          // bytes that one copy moves
constexpr int kEarly = 1;                      // such blocks per SM that begin beside those of states
constexpr int kStateKeys = 64;               // features of a block of states
constexpr int kStateValues = 32;
constexpr int kStateKeyWarps = 4;      // its warps
constexpr int kStateValueWarps = 1;
constexpr int kBatch = 128;                        // steps per barrier there
constexpr int kStages = 3;                      // batches in shared memory
constexpr int kAhead = 1 * 128;                       // features of q that L2 fetches meanwhile

static_assert(!kgen::kPresent<kgen::none> && !kgen::kPresent<kgen::none>,
              "these blocks know no sums of keys");

using States = kgen::StateWalk<T, kE, kM, kStateKeys, kStateValues, kStateKeyWarps,
                               kStateValueWarps, kChunk, kBatch, kStages, kCopy, kAhead>;
using Outputs = kgen::ChunkOutputs<T, kE, kM, kChunk, kSlice, kStepTiles, kCopy, false, kEarly>;

constexpr int kAllM = kgen::whole_fragments(kM);
constexpr int kStoredState = kgen::whole_fragments(kE) * kAllM;

}  // namespace

extern "C" __global__ void __launch_bounds__(States::kThreads, 1)
linear_attention_states(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                        const T* __restrict__ k,  // [B, H, T, E]
                        const T* __restrict__ v,  // [B, H, T, M]
                        const InitialState* __restrict__ initial_state,  // [B, H, E, M]
                        T* __restrict__ states,  // [B * H, chunks, E, M], whole fragments
                        FinalState* __restrict__ final_state,  // [B, H, E, M]
                        kgen::i64 H, kgen::i64 steps,
                        kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                        kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                        kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T) {
    if constexpr (kEarly > 0) kgen::let_next_kernel_start();
    const kgen::i64 block = blockIdx.x;
    const kgen::i64 head = block / States::kBlocks;
    const kgen::i64 chunks = kgen::ceil_div(steps, kgen::i64{kChunk});
    const kgen::StateEnds<T> ends{kgen::floats_at(initial_state, head * kE * kM),
                                  states + head * chunks * kStoredState,
                                  kgen::floats_at(final_state, head * kE * kM), 1.0f};
    States(kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
           kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T), steps, ends,
           static_cast<int>(block % States::kBlocks),
           kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T))
        .walk();
}

KGEN_EXPORT(linear_attention_states);

extern "C" __global__ void __launch_bounds__(Outputs::kThreads, kMinBlocks)
linear_attention_forward(const T* __restrict__ q,  // [B, H, T, E], rows q_stride_T apart
                         const T* __restrict__ k,  // [B, H, T, E]
                         const T* __restrict__ v,  // [B, H, T, M]
                         const T* __restrict__ states,  // [B * H, chunks, E, M], whole fragments
                         T* __restrict__ out,           // [B, H, T, M]
                         kgen::i64 H, kgen::i64 steps,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale) {
    const int chunks = static_cast<int>(kgen::ceil_div(steps, kgen::i64{kChunk}));
    const kgen::WalkPlace place(steps, kChunk, chunks, chunks, Outputs::kSlices);
    const int value = place.rest * kSlice;
    const kgen::i64 head = place.head;

    const kgen::WalkRows<T> rows{
        kgen::head_rows(q, head, H, q_stride_B, q_stride_H, q_stride_T),
        kgen::head_rows(k, head, H, k_stride_B, k_stride_H, k_stride_T),
        kgen::head_rows(v, head, H, v_stride_B, v_stride_H, v_stride_T).from(value),
        kgen::head_rows(out, head, H, out_stride_B, out_stride_H, out_stride_T).from(value),
        place.first, place.end, kgen::min(kM - value, kSlice), scale, 1.0f};

    kgen::StoredState<T> state{};
    if (place.segment > 0 || kgen::kPresent<InitialState>)
        state.stored = states + (head * chunks + place.segment) * kStoredState + value;
    state.row_stride = kAllM;
    Outputs(rows, state).run();
}

KGEN_EXPORT(linear_attention_forward);
