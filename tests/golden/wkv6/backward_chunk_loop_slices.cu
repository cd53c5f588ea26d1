// Rendered by kgen from templates/wkv/backward_chunk_loop_slices.cu.jinja
// config: chunk_loop_slices(copy_bytes=16, min_blocks=1, chunk=32, block_v=64, stages=3, sequential_chunks=false, key_slices=2, value_slices=2)
// problem: K=256, V=256, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv5 and wkv6 backward on tensor cores, in slices: a block has K / key_slices keys and V / value_slices value
// features of a head, for heads whose whole state would exceed a block's shared memory. All sums are in a fixed order.
//
//     wkv_backward_states      loops over the steps, forward with the state and backward with its gradient, and writes
//                              both at the ends of chunks
//     wkv_backward_chunks      computes the slice's terms of all gradients of a chunk from both, in fp32
//     wkv_backward_reduce      gu, and wkv5's gw
//     wkv_backward_add_slices  adds the slices' terms: gr, gk, gv and wkv6's gw
//
// Terms of gr, gk and gw are [B, T, H, value_slices, K], terms of gv are [B, T, H, key_slices, V]. Sequences are batch
// rows or packed. Shared memory and barriers: kgen/wkv/state_loop.cuh, kgen/wkv/chunk_memory.cuh.
#include "kgen/wkv/chunked_backward.cuh"
#include "kgen/wkv/slices.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Offset = kgen::none;
using kgen::i64;
using kgen::wkv::Rows;

constexpr int kKeySlices = 2;
constexpr int kValueSlices = 2;
constexpr int kK = 256 / kKeySlices;                // of a block
constexpr int kV = 256 / kValueSlices;              // of a block
constexpr int kChunk = 32;                     // steps between two checkpoints
constexpr int kBlockV = 64;                  // value features of a block, first kernel
constexpr int kStages = 3;                   // buffers of 32 steps in shared memory, first kernel
constexpr int kCopyBytes = 16;            // bytes of one asynchronous copy
constexpr int kMinBlocks = 1;            // blocks per SM that registers leave room for
constexpr bool kSequential = false;   // one block per head loops over its chunks
constexpr int kStaggerKcycles = 0;  // delay of an SM's later blocks
constexpr bool kPdl = false;                        // programmatic dependent launch
constexpr bool kLevelScores = false;       // scores and gv on tensor cores

constexpr bool kPerStep = true;  // w is [B, T, H, K], not [H, K]
constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kPrecise = kgen::wkv::kPreciseGradients<Value, W, kInitialState>;

using Block = kgen::wkv::BackwardConfig<Value, W, kForm, kPerStep, kPrecise, kK, kV, kChunk,
                                        kBlockV, kStages, kCopyBytes, kSequential, kPdl,
                                        kgen::kPresent<Offset>, kLevelScores>;
using Config = kgen::wkv::SliceOf<Block, kKeySlices, kValueSlices>;
using Backward = kgen::wkv::ChunkedBackward<Config, U, Offset, kStaggerKcycles>;
using Tensors = kgen::wkv::ChunkTensors<Config, U>;
constexpr int kThreads = Config::kThreads;
constexpr int kReduceThreads = 512;
constexpr int kAddThreads = 256;
constexpr int kKeyTerms = kValueSlices * 256, kValueTerms = kKeySlices * 256;

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_backward_states(const Value* __restrict__ gy,             // [B, T, H, V]
                    const Value* __restrict__ r,              // [B, T, H, K]
                    const Value* __restrict__ k,              // [B, T, H, K]
                    const Value* __restrict__ v,              // [B, T, H, V]
                    const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
                    const float* __restrict__ initial_state,  // [N, H, K, V] or null
                    const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                    const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
                    float* __restrict__ ginitial_state,       // [N, H, K, V] or null
                    float* __restrict__ states,               // [all chunks, slices, ...]
                    float* __restrict__ gradients,            // as states, or [N, H, slices, ...]
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
                    const Offset* __restrict__ cu_seqlens,   // [N + 1] or null
                    float* __restrict__ ginitial_state,      // [N, H, K, V] or null
                    const float* __restrict__ states,        // [all chunks, slices, ...]
                    float* __restrict__ gradients,           // as states, or [N, H, slices, ...]
                    float* __restrict__ gr_terms,            // [B, T, H, value_slices, K]
                    float* __restrict__ gk_terms,            // [B, T, H, value_slices, K]
                    float* __restrict__ gv_terms,            // [B, T, H, key_slices, V]
                    float* __restrict__ gw_terms,            // [B, T, H, value_slices, K]
                    float* __restrict__ gu_parts,            // [all chunks, value_slices, K]
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
        u,
        {kgen::wkv::term_rows<kKeyTerms>(gr_terms, T, H)},
        {kgen::wkv::term_rows<kKeyTerms>(gk_terms, T, H)},
        {kgen::wkv::term_rows<kValueTerms>(gv_terms, T, H)},
        {kgen::wkv::term_rows<kKeyTerms>(gw_terms, T, H)}};
    float* gw_parts = nullptr;
    __shared__ Backward::Index shared_index;
    Backward::write_gradients(cu_seqlens, N, H, T, tensors, gfinal_state, ginitial_state, states,
                              gradients, gu_parts, gw_parts, scale, &shared_index);
}

KGEN_EXPORT(wkv_backward_chunks);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gu_parts,  // [all chunks, value_slices, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 N, i64 B, i64 H, i64 T) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    Backward::reduce<kReduceThreads, U>(N, B, H, T, gu_parts, gu, nullptr, nullptr);
}

KGEN_EXPORT(wkv_backward_reduce);

extern "C" __global__ void __launch_bounds__(kAddThreads)
wkv_backward_add_slices(const Value* __restrict__ gy,        // [B, T, H, V]
                        const Value* __restrict__ r,         // [B, T, H, K]
                        const Value* __restrict__ k,         // [B, T, H, K]
                        const Value* __restrict__ v,         // [B, T, H, V]
                        const U* __restrict__ u,             // [H, K]
                        const float* __restrict__ gr_terms,  // as above
                        const float* __restrict__ gk_terms,
                        const float* __restrict__ gv_terms,
                        const float* __restrict__ gw_terms,
                        Value* __restrict__ gr,              // [B, T, H, K]
                        Value* __restrict__ gk,              // [B, T, H, K]
                        Value* __restrict__ gv,              // [B, T, H, V]
                        W* __restrict__ gw,                  // [B, T, H, K]
                        i64 B, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                        i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
                        i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
                        i64 v_stride_H, i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H,
                        i64 gk_stride_B, i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B,
                        i64 gv_stride_T, i64 gv_stride_H,
                        i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H,
                        float scale) {
    if constexpr (kPdl) kgen::griddepcontrol_wait(gr_terms, gk_terms, gv_terms, gw_terms);
    const kgen::wkv::AddSlices<Config> add{B, T, H};
    if (!add.exists()) return;
    const Rows<const Value> r_rows{r, r_stride_B, r_stride_T, r_stride_H};
    const Rows<const Value> k_rows{k, k_stride_B, k_stride_T, k_stride_H};
    const float n = add.value_product(u, {v, v_stride_B, v_stride_T, v_stride_H},
                                      {gy, gy_stride_B, gy_stride_T, gy_stride_H}, scale);
    add.keys(gr_terms, n, u, k_rows, {gr, gr_stride_B, gr_stride_T, gr_stride_H});
    add.keys(gk_terms, n, u, r_rows, {gk, gk_stride_B, gk_stride_T, gk_stride_H});
    add.values(gv_terms, {gv, gv_stride_B, gv_stride_T, gv_stride_H});
    add.decays(gw_terms, Rows<W>{gw, gw_stride_B, gw_stride_T, gw_stride_H});
}

KGEN_EXPORT(wkv_backward_add_slices);
