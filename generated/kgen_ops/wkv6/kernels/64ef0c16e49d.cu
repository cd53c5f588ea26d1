// digest: 64ef0c16e49d
// Rendered by kgen from templates/wkv/backward_chunk_loop.cu.jinja
// config: chunk_loop(copy_bytes=16, min_blocks=1, chunk=32, block_v=32, stages=2, sequential_chunks=false, pdl=true)
// problem: K=64, V=64, dtype=fp16, w_dtype=fp32, u_dtype=fp16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv5 and wkv6 backward on tensor cores. All sums are in a fixed order.
//
//     wkv_backward_states  loops over the steps, forward with the state and backward with its gradient, and writes
//                          both at the ends of chunks
//     wkv_backward_chunks  computes all gradients of a chunk from both; one block per chunk, or, if kSequential, one
//                          block per head that loops backward over its chunks and carries the state's gradient along
//     wkv_backward_reduce  gu, and wkv5's gw
//
// Shared memory and barriers: kgen/wkv/state_loop.cuh, kgen/wkv/chunk_memory.cuh.
#include "kgen/primitives/sm.cuh"
#include "kgen/wkv/chunk_gradients.cuh"
#include "kgen/wkv/reduce.cuh"
#include "kgen/wkv/state_loop.cuh"

namespace {

using Value = kgen::fp16;
using W = float;
using U = kgen::fp16;
using kgen::i64;
using kgen::u32;
using kgen::wkv::ChunkIndex;
using kgen::wkv::Rows;

constexpr int kK = 64;
constexpr int kV = 64;
constexpr int kChunk = 32;                     // steps between two checkpoints
constexpr int kBlockV = 32;                  // value features of a block, first kernel
constexpr int kStages = 2;                   // buffers of 32 steps in shared memory, first kernel
constexpr int kCopyBytes = 16;            // bytes of one asynchronous copy
constexpr int kMinBlocks = 1;            // blocks per SM that registers leave room for
constexpr bool kSequential = false;   // one block per head loops over its chunks
constexpr int kStaggerKcycles = 0;  // delay of an SM's later blocks
constexpr bool kPdl = true;                        // programmatic dependent launch
constexpr bool kLevelScores = false;       // scores and gv on tensor cores

constexpr bool kPerStep = true;  // w is [B, T, H, K], not [H, K]
constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr bool kPrecise = kgen::wkv::kPreciseGradients<Value, W, kInitialState>;

using Config = kgen::wkv::BackwardConfig<Value, W, kForm, kPerStep, kPrecise, kK, kV, kChunk,
                                         kBlockV, kStages, kCopyBytes, kSequential, kPdl, false,
                                         kLevelScores>;
using Gradients = kgen::wkv::ChunkGradients<Config, U>;
using StatePassing = kgen::wkv::StatePassing<Config>;
using Tile = StatePassing::Tile;  // of a state, per warp
constexpr int kThreads = Config::kThreads;
constexpr int kValueBlocks = kgen::ceil_div(kV, kBlockV);
constexpr int kDirections = kSequential ? 1 : 2;
constexpr int kReduceThreads = 512;

}  // namespace

// The state before each chunk and, unless kSequential, the gradient of the state after it, each
// [B * H, chunks, K / 16, V / 8, 32, 4] for padded K and V.
extern "C" __global__ void __launch_bounds__(kThreads)
wkv_backward_states(const Value* __restrict__ gy,             // [B, T, H, V]
                    const Value* __restrict__ r,              // [B, T, H, K]
                    const Value* __restrict__ k,              // [B, T, H, K]
                    const Value* __restrict__ v,              // [B, T, H, V]
                    const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
                    const float* __restrict__ initial_state,  // [B, H, K, V] or null
                    const float* __restrict__ gfinal_state,   // [B, H, K, V] or null
                    float* __restrict__ ginitial_state,       // [B, H, K, V] or null
                    float* __restrict__ states,               // as above
                    float* __restrict__ gradients,            // as above
                    i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                    i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                    i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                    i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                    float scale) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const Rows<const W> w_rows{w, w_stride_B, w_stride_T, w_stride_H};
    const Rows<const Value> gy_rows{gy, gy_stride_B, gy_stride_T, gy_stride_H};
    const Rows<const Value> r_rows{r, r_stride_B, r_stride_T, r_stride_H};
    const Rows<const Value> k_rows{k, k_stride_B, k_stride_T, k_stride_H};
    const Rows<const Value> v_rows{v, v_stride_B, v_stride_T, v_stride_H};

    // 1. The block's head, direction and value features.
    const i64 block = blockIdx.x, head = block / (kDirections * kValueBlocks), b = head / H,
              h = head % H;
    const bool backward = block / kValueBlocks % kDirections != 0;
    const int value = static_cast<int>(block % kValueBlocks) * kBlockV;
    const int width = kgen::min(kV - value, kBlockV);
    const i64 chunks = kgen::ceil_div(T, i64{kChunk});
    const i64 state = head * kK * kV + value;
    const i64 checkpoint = Config::state_offset(head, chunks, 0) + value / 8 * kgen::kWarpSize * 4;
    const i64 checkpoint_stride = Config::state_offset(0, 1, 1) - Config::state_offset(0, 1, 0);
    const int block_tiles = kgen::min(Config::kTiles - value / 8, kBlockV / 8);
    const auto steps_of = [&](const Rows<const Value>& rows, int feature) {
        const Rows<const Value> its = rows.head(b, h);
        return kgen::StepRows<const Value>{its.first + feature, its.stride_t};
    };
    const Rows<const W> w_h = w_rows.head(b, h);
    const kgen::StepRows<const W> w_steps{w_h.first, w_h.stride_t};

    // 2. 32 steps at a time: S = diag(d) S + k^T v, or G = diag(d) G + scale r^T gy.
    using Loop = kgen::wkv::StateLoop<Config>;
    if (!kSequential && backward) {
        Loop{steps_of(r_rows, 0), steps_of(gy_rows, value), w_steps, T, width, scale}
            .template run<true>(kFinalState && gfinal_state ? gfinal_state + state : nullptr,
                                gradients + checkpoint, checkpoint_stride, block_tiles,
                                kInitialState && ginitial_state ? ginitial_state + state : nullptr);
    } else {
        Loop{steps_of(k_rows, 0), steps_of(v_rows, value), w_steps, T, width, 1.0f}
            .template run<false>(kInitialState && initial_state ? initial_state + state : nullptr,
                                 states + checkpoint, checkpoint_stride, block_tiles, nullptr);
    }
}

KGEN_EXPORT(wkv_backward_states);

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
wkv_backward_chunks(const Value* __restrict__ gy,            // [B, T, H, V]
                    const Value* __restrict__ r,             // [B, T, H, K]
                    const Value* __restrict__ k,             // [B, T, H, K]
                    const Value* __restrict__ v,             // [B, T, H, V]
                    const W* __restrict__ w,                 // [B, T, H, K], or [H, K]
                    const U* __restrict__ u,                 // [H, K]
                    const float* __restrict__ gfinal_state,  // [B, H, K, V] or null
                    float* __restrict__ ginitial_state,      // [B, H, K, V] or null
                    const float* __restrict__ states,        // as above
                    float* __restrict__ gradients,           // as above, or one per head
                    Value* __restrict__ gr,                  // [B, T, H, K]
                    Value* __restrict__ gk,                  // [B, T, H, K]
                    Value* __restrict__ gv,                  // [B, T, H, V]
                    W* __restrict__ gw,                      // [B, T, H, K]
                    float* __restrict__ gu_parts,            // [B, H, chunks, K]
                    i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                    i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                    i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                    i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                    i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                    i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                    i64 gv_stride_H,
                    i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H,
                    float scale) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const kgen::wkv::ChunkTensors<Config, U> tensors{
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
    __shared__ ChunkIndex shared_index;

    const auto chunk_gradients = [&](const Gradients& chunk, const ChunkIndex& index,
                                     const float* state, float* gradient) {
        kgen::wkv::write_chunk_gradients(chunk, index, state, gradient, gu_parts, gw_parts);
    };

    // A grid has fewer than 2^31 blocks, so these numbers fit 32 bits.
    const u32 chunks = static_cast<u32>(kgen::ceil_div(T, i64{kChunk}));
    const u32 heads = static_cast<u32>(H), head = kSequential ? blockIdx.x : blockIdx.x / chunks;
    const u32 number = kSequential ? chunks - 1 : blockIdx.x % chunks;
    const i64 left = T - static_cast<i64>(number) * kChunk;
    ChunkIndex index{static_cast<int>(head / heads), static_cast<int>(head % heads),
                     static_cast<int>(number), static_cast<int>(kgen::min(left, i64{kChunk})),
                     static_cast<int>(head * chunks + number)};
    if constexpr (!kSequential) {
        const i64 offset = Config::state_offset(head, chunks, number);
        const Gradients chunk{tensors, &shared_index, scale};
        chunk.clear_padding();
        chunk_gradients(chunk, index, states + offset, gradients + offset);
    } else {
        // Loops backward over the head's chunks. Between two chunks the gradient of the state lies in `gradients`,
        // because the scores take all registers. A thread reads only what it wrote itself, so that no barrier is
        // needed.
        const auto gradient = [&] { return gradients + Config::state_offset(blockIdx.x, 1, 0); };
        const i64 state = i64{head} * kK * kV;
        const float* last_gradient =
            kFinalState && gfinal_state ? gfinal_state + state : nullptr;
        float* first_gradient = kInitialState && ginitial_state ? ginitial_state + state : nullptr;
        const auto key0 = [] { return kgen::wkv::read_thread_rank() / kgen::kWarpSize * 16; };
        {
            const int first_key = key0();
            Tile last;
            last.clear();
            if (last_gradient != nullptr)
                last.load_rows(last_gradient + i64{first_key} * kV, kV, kK - first_key, kV);
            last.store_fragments(gradient(), Config::kTiles);
        }
        Gradients{tensors, &shared_index, scale}.clear_padding();
        if (index.chunk >= 0) Gradients{tensors, &shared_index, scale}.copy_keys(index);
        if constexpr (kPdl) kgen::griddepcontrol_wait(states);
        // The two blocks of an SM go through the same phases, and each phase uses another unit of the SM. If the blocks
        // ran in step, they would compete for each of these units.
        if constexpr (kStaggerKcycles > 0)
            if (static_cast<int>(blockIdx.x) >= kgen::sm_count())
                kgen::sleep_cycles(1000 * kStaggerKcycles);
#pragma unroll 1
        while (index.chunk >= 0) {
            const Gradients chunk{tensors, &shared_index, scale};
            chunk_gradients(chunk, index, states + Config::state_offset(0, 0, index.part),
                            gradient());
            index = shared_index.previous(kChunk);
            kgen::sync_block();  // before the next chunk's index and copies overwrite this one's
        }
        if (first_gradient != nullptr) {
            const int first_key = key0();
            Tile first;
            first.load_fragments(gradient());
            first.store_rows(first_gradient + i64{first_key} * kV, kV, kK - first_key, kV);
        }
    }
}

KGEN_EXPORT(wkv_backward_chunks);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gu_parts,  // [B, H, chunks, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 B, i64 H, i64 T) {
    kgen::wkv::sum_chunks<kReduceThreads, kPdl>(i64{blockIdx.x}, gu_parts, B, H, i64{kK},
                                                kgen::ceil_div(T, i64{kChunk}), gu);
}

KGEN_EXPORT(wkv_backward_reduce);
