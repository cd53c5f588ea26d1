// digest: 25f3ad4ee956
// Rendered by kgen from templates/wkv/backward_chunk_halving_packed.cu.jinja
// config: chunk_halving_packed(copy_bytes=16, min_blocks=4, groups=1, stages=3, gradient_terms=1, row_copies=true, pdl=true)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=int32, decay_form=raw
// wkv5 and wkv6 backward for packed sequences of different lengths: backward_chunk_halving with segments of one length
// that run concurrently; bf16, also w.
//
//     wkv_segment_states      what segments add to the state and to its gradient, if another segment needs it
//     wkv_backward_states     loops over the steps of a segment with the state, and writes it before every 16 steps
//     wkv_backward_gradients  one block per segment: loops backward over its chunks, all gradients
//     wkv_backward_reduce     gu, and wkv5's gw
//
// Formulas, shared memory and barriers: kgen/wkv6/segmented_gradients.cuh, kgen/wkv6/segment_states.cuh,
// kgen/wkv/state_loop.cuh, kgen/wkv6/gradient_loop.cuh; segments: kgen/wkv/packed_segments.cuh.
#include "kgen/wkv/reduce.cuh"
#include "kgen/wkv6/segmented_gradients.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = kgen::bf16;
using Offset = kgen::i32;
using kgen::i64;
using kgen::u32;
using kgen::wkv::Rows;
using kgen::wkv::Span;
using kgen::wkv::step_pointer;
using kgen::wkv::step_rows;

constexpr int kStages = 3;         // buffers of 32 steps in shared memory, second kernel
constexpr int kCopyBytes = 16;  // bytes of one asynchronous copy
constexpr bool kPdl = true;              // programmatic dependent launch

struct Config {
    using W = ::W;
    using U = ::U;
    static constexpr auto kForm = kgen::DecayForm::raw;  // of w
    static constexpr bool kPerStep = false;                  // w is [B, T, H, K], not [H, K]
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr int kGroups = 1;  // groups of warps, which take chunks in turn
    static constexpr int kVec = kCopyBytes / static_cast<int>(sizeof(Value));
    static constexpr int kTerms = 1;  // bf16 terms of the state's gradient in products with v and S
    static constexpr bool kRowCopies = true;  // copies and writes are of whole rows
    static constexpr int kSegments = 2;  // or more
};

struct SumConfig : Config {  // of the first kernel
    static constexpr int kColumns = kgen::min(kV, 64);  // value features of a block
    static constexpr int kStages = 4;                   // chunks of 32 steps in shared memory
    static constexpr bool kExact = false;
};

using Sums = kgen::wkv6::SegmentStates<SumConfig>;
using Loop = kgen::wkv6::GradientLoop<Config>;
using States = kgen::wkv::BackwardConfig<Value, W, Config::kForm, Config::kPerStep, false, Config::kK,
                                         Config::kV, 32, 16 * kgen::ceil_div(Config::kV, 16), kStages,
                                         kCopyBytes, true, kPdl, true>;
constexpr int kReduceThreads = 512;

static_assert(!kgen::kPresent<kgen::none>, "the gradient of a state is more accurate");
static_assert(kgen::kPresent<Offset>, "batch rows have one length");

struct Shape {
    using Config = ::Config;
    using SumConfig = ::SumConfig;
    using States = ::States;
    using Offset = ::Offset;
    using Cut = kgen::wkv::PackedSegments<Offset>;
    static constexpr bool kFinalState = kgen::kPresent<kgen::none>;
};

using Gradients = kgen::wkv6::SegmentedGradients<Shape>;

template <class Target>
KGEN_DEVICE void sum_groups(i64 block, const float* parts, i64 slots, i64 H, Target* to) {
    kgen::wkv::sum_chunks<kReduceThreads, kPdl>(block, parts, slots, H, i64{Config::kK}, i64{Config::kGroups}, to);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Sums::kThreads, Sums::kMinBlocks)
wkv_segment_states(const Value* __restrict__ gy,           // [B, T, H, V]
                   const Value* __restrict__ r,            // [B, T, H, K]
                   const Value* __restrict__ k,            // [B, T, H, K]
                   const Value* __restrict__ v,            // [B, T, H, V]
                   const W* __restrict__ w,                // [B, T, H, K], or [H, K]
                   const Offset* __restrict__ cu_seqlens,  // [N + 1]
                   float* __restrict__ segment_sums,       // [2, H, slots, K, V]
                   float* __restrict__ segment_decays,     // [2, H, slots, K]
                   i64 N, i64 T, i64 H, i64 segment_steps, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                   i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                   i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                   float scale) {
    const Rows<const W> w_rows = kgen::wkv::same_at_every_step(w, Config::kK);
    const kgen::wkv::PackedSegments<Offset> cut{cu_seqlens, N, T, H, segment_steps};
    // Blocks for the state and blocks for its gradient alternate, so that blocks that read the same w are near each
    // other.
    if (blockIdx.x % 2 == 0) {
        Gradients::sum_segments<false>(cut, N, T, H, cu_seqlens, {k, k_stride_B, k_stride_T, k_stride_H},
                           {v, v_stride_B, v_stride_T, v_stride_H}, w_rows, segment_sums, segment_decays, 1.0f);
    } else {
        Gradients::sum_segments<true>(cut, N, T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
                          {gy, gy_stride_B, gy_stride_T, gy_stride_H}, w_rows, segment_sums, segment_decays, scale);
    }
}

KGEN_EXPORT(wkv_segment_states);

extern "C" __global__ void __launch_bounds__(States::kThreads, 1)
wkv_backward_states(const Value* __restrict__ k,          // [B, T, H, K]
                    const Value* __restrict__ v,          // [B, T, H, V]
                    const W* __restrict__ w,              // [B, T, H, K], or [H, K]
                    const Offset* __restrict__ cu_seqlens,  // [N + 1]
                    const float* __restrict__ segment_sums,  // as above
                    const float* __restrict__ segment_decays,
                    u32* __restrict__ states,             // [chunks, K / 16, V / 16, 32, 4], pairs
                    i64 N, i64 T, i64 H, i64 segment_steps, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
                    i64 v_stride_B, i64 v_stride_T, i64 v_stride_H
                    ) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const Rows<const W> w_rows = kgen::wkv::same_at_every_step(w, Config::kK);
    const kgen::wkv::PackedSegments<Offset> cut{cu_seqlens, N, T, H, segment_steps};
    Gradients::write_states(cut, N, T, H, cu_seqlens, {k, k_stride_B, k_stride_T, k_stride_H},
                            {v, v_stride_B, v_stride_T, v_stride_H}, w_rows, segment_sums, segment_decays, states);
}

KGEN_EXPORT(wkv_backward_states);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 4)
wkv_backward_gradients(const Value* __restrict__ gy,            // [B, T, H, V]
                       const Value* __restrict__ r,             // [B, T, H, K]
                       const Value* __restrict__ k,             // [B, T, H, K]
                       const Value* __restrict__ v,             // [B, T, H, V]
                       const W* __restrict__ w,                 // [B, T, H, K], or [H, K]
                       const U* __restrict__ u,                 // [H, K]
                       const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
                       const Offset* __restrict__ cu_seqlens,   // [N + 1]
                       const float* __restrict__ segment_sums,  // as above
                       const float* __restrict__ segment_decays,
                       const u32* __restrict__ states,
                       Value* __restrict__ gr,                  // [B, T, H, K]
                       Value* __restrict__ gk,                  // [B, T, H, K]
                       Value* __restrict__ gv,                  // [B, T, H, V]
                       float* __restrict__ gw_parts,            // [slots, H, groups, K]
                       float* __restrict__ gu_parts,            // [slots, H, groups, K]
                       i64 N, i64 T, i64 H, i64 segment_steps, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                       i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                       i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                       i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                       i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                       i64 gv_stride_H,
                       float scale) {
    if constexpr (kPdl) {
        kgen::griddepcontrol_launch_dependents();
        kgen::griddepcontrol_wait(states, segment_sums, segment_decays);
    }
    const kgen::wkv::PackedSegments<Offset> cut{cu_seqlens, N, T, H, segment_steps};
    const Gradients::Segment segment(cut, cu_seqlens, N, T, H);
    const Span& span = segment.span;
    const i64 h = segment.h;
    const Rows<const Value> gy_rows{gy, gy_stride_B, gy_stride_T, gy_stride_H};
    const Rows<const Value> r_rows{r, r_stride_B, r_stride_T, r_stride_H};
    const Rows<const W> w_rows = kgen::wkv::same_at_every_step(w, Config::kK);
    const auto after = Gradients::gradient_after(cut, segment, N, H, gy_rows, r_rows, w_rows, gfinal_state,
                                                 segment_sums, segment_decays, scale);
    const i64 parts = blockIdx.x * i64{Config::kGroups} * Config::kK;
    __shared__ Loop::Head shared;
    if (kgen::thread_rank() == 0) shared = {
        span.steps,
        step_pointer(gy_rows, span, h),
        step_pointer(r_rows, span, h),
        step_pointer(Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}, span, h),
        step_pointer(Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}, span, h),
        step_pointer(w_rows, span, h),
        u + h * Config::kK,
        {after},
        states + segment.chunk * Loop::kStateWords,
        step_rows(Rows<Value>{gr, gr_stride_B, gr_stride_T, gr_stride_H}, span, h),
        step_rows(Rows<Value>{gk, gk_stride_B, gk_stride_T, gk_stride_H}, span, h),
        step_rows(Rows<Value>{gv, gv_stride_B, gv_stride_T, gv_stride_H}, span, h),
        {},
        gu_parts + parts, gw_parts + parts,
        scale};
    kgen::sync_block();
    Loop{shared}();
}

KGEN_EXPORT(wkv_backward_gradients);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gw_parts,  // [slots, H, groups, K]
                    const float* __restrict__ gu_parts,  // [slots, H, groups, K]
                    W* __restrict__ gw,                  // [H, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 segment_slots, i64 H) {
    const i64 blocks = gridDim.x / 2, block = blockIdx.x;  // gu, then gw
    if (block < blocks) {
        sum_groups(block, gu_parts, segment_slots, H, gu);
    } else {
        sum_groups(block - blocks, gw_parts, segment_slots, H, gw);
    }
}

KGEN_EXPORT(wkv_backward_reduce);
