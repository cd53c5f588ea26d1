// Rendered by kgen from templates/wkv/backward_chunk_loop_packed.cu.jinja
// config: chunk_loop_packed(copy_bytes=16, min_blocks=1, chunk=64, block_v=64, stages=4, sequential_chunks=true)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=int32, decay_form=log
// wkv5 and wkv6 backward on tensor cores, for packed sequences. All sums are in a fixed order.
//
//     wkv_backward_states  loops over the steps of a sequence, forward with the state and backward with its gradient,
//                          and writes both at the ends of chunks
//     wkv_backward_chunks  computes all gradients of a chunk from both; one block per chunk slot, or, if kSequential,
//                          one block per sequence and head that loops backward over its chunks
//     wkv_backward_reduce  gu, and wkv5's gw
//
// Shared memory and barriers: kgen/wkv/state_loop.cuh, kgen/wkv/chunk_memory.cuh.
#include "kgen/wkv/chunked_backward.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Offset = kgen::i32;
using kgen::i64;
using kgen::wkv::Rows;

constexpr int kK = 64;
constexpr int kV = 64;
constexpr int kChunk = 64;                     // steps between two checkpoints
constexpr int kBlockV = 64;                  // value features of a block, first kernel
constexpr int kStages = 4;                   // buffers of 32 steps in shared memory, first kernel
constexpr int kCopyBytes = 16;            // bytes of one asynchronous copy
constexpr int kMinBlocks = 1;            // blocks per SM that registers leave room for
constexpr bool kSequential = true;   // one block per head loops over its chunks
constexpr int kStaggerKcycles = 0;  // delay of an SM's later blocks
constexpr bool kPdl = false;                        // programmatic dependent launch
constexpr bool kLevelScores = false;       // scores and gv on tensor cores

constexpr bool kPerStep = true;  // w is [B, T, H, K], not [H, K]
constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kPrecise = kgen::wkv::kPreciseGradients<Value, W, kInitialState>;

using Config = kgen::wkv::BackwardConfig<Value, W, kForm, kPerStep, kPrecise, kK, kV, kChunk,
                                         kBlockV, kStages, kCopyBytes, kSequential, kPdl, true,
                                         kLevelScores>;
using Backward = kgen::wkv::ChunkedBackward<Config, U, Offset, kStaggerKcycles>;
using Tensors = kgen::wkv::ChunkTensors<Config, U>;
constexpr int kThreads = Config::kThreads;
constexpr int kReduceThreads = 512;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_backward_states(const Value* __restrict__ gy,             // [B, T, H, V]
                    const Value* __restrict__ r,              // [B, T, H, K]
                    const Value* __restrict__ k,              // [B, T, H, K]
                    const Value* __restrict__ v,              // [B, T, H, V]
                    const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
                    const float* __restrict__ initial_state,  // [N, H, K, V] or null
                    const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                    const Offset* __restrict__ cu_seqlens,    // [N + 1]
                    float* __restrict__ ginitial_state,       // [N, H, K, V] or null
                    float* __restrict__ states,               // [H, chunk_slots, ...]
                    float* __restrict__ gradients,            // as states, or [N, H, ...]
                    i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                    i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                    i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                    i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                    float scale) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const Tensors tensors{
        {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H},
        {w, w_stride_B, w_stride_T, w_stride_H},
        nullptr, {}, {}, {}, {}};
    Backward::write_states(cu_seqlens, N, H, T, tensors, initial_state, gfinal_state,
                           ginitial_state, states, gradients, scale);
}

KGEN_EXPORT(wkv_backward_states);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv_backward_chunks(const Value* __restrict__ gy,            // [B, T, H, V]
                    const Value* __restrict__ r,             // [B, T, H, K]
                    const Value* __restrict__ k,             // [B, T, H, K]
                    const Value* __restrict__ v,             // [B, T, H, V]
                    const W* __restrict__ w,                 // [B, T, H, K], or [H, K]
                    const U* __restrict__ u,                 // [H, K]
                    const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
                    const Offset* __restrict__ cu_seqlens,   // [N + 1]
                    float* __restrict__ ginitial_state,      // [N, H, K, V] or null
                    const float* __restrict__ states,        // [H, chunk_slots, ...]
                    float* __restrict__ gradients,           // as states, or [N, H, ...]
                    Value* __restrict__ gr,                  // [B, T, H, K]
                    Value* __restrict__ gk,                  // [B, T, H, K]
                    Value* __restrict__ gv,                  // [B, T, H, V]
                    W* __restrict__ gw,                      // [B, T, H, K]
                    float* __restrict__ gu_parts,            // [H, chunk_slots, K]
                    i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                    i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                    i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                    i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                    i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                    i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                    i64 gv_stride_H,
                    i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H,
                    float scale) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const Tensors tensors{
        {gy, gy_stride_B, gy_stride_T, gy_stride_H},
        {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H},
        {v, v_stride_B, v_stride_T, v_stride_H},
        {w, w_stride_B, w_stride_T, w_stride_H},
        u,
        {gr, gr_stride_B, gr_stride_T, gr_stride_H},
        {gk, gk_stride_B, gk_stride_T, gk_stride_H},
        {gv, gv_stride_B, gv_stride_T, gv_stride_H},
        {gw, gw_stride_B, gw_stride_T, gw_stride_H}};
    float* gw_parts = nullptr;
    __shared__ Backward::Index shared_index;
    Backward::write_gradients(cu_seqlens, N, H, T, tensors, gfinal_state, ginitial_state, states,
                              gradients, gu_parts, gw_parts, scale, &shared_index);
}

KGEN_EXPORT(wkv_backward_chunks);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gu_parts,  // [H, chunk_slots, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 N, i64 B, i64 H, i64 T) {
    Backward::reduce<kReduceThreads, U>(N, B, H, T, gu_parts, gu, nullptr, nullptr);
}

KGEN_EXPORT(wkv_backward_reduce);
