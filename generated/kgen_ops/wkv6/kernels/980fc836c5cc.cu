// digest: 980fc836c5cc
// Rendered by kgen from templates/wkv/backward_chunk_halving_segments.cu.jinja
// config: chunk_halving_segments(copy_bytes=16, min_blocks=1, groups=3, stages=4, gradient_terms=2, segments=5)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=raw
// wkv5 and wkv6 backward for few heads: backward_chunk_halving with segments of T that run concurrently; bf16, also w.
//
//     wkv_segment_states      what each segment adds to the state and to its gradient, and its product of decays
//     wkv_backward_states     loops over the steps of a segment with the state, and writes it before every 16 steps
//     wkv_backward_gradients  one block per segment: loops backward over its chunks, all gradients
//     wkv_backward_reduce     gu, and wkv5's gw
//
// Formulas, shared memory and barriers: kgen/wkv6/segmented_gradients.cuh, kgen/wkv6/segment_states.cuh,
// kgen/wkv/state_loop.cuh, kgen/wkv6/gradient_loop.cuh.
#include "kgen/wkv/reduce.cuh"
#include "kgen/wkv6/segmented_gradients.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::u32;
using kgen::wkv::Rows;
using kgen::wkv::Span;
using kgen::wkv::step_pointer;
using kgen::wkv::step_rows;

constexpr int kSegments = 5;     // segments of T
constexpr int kStages = 4;         // buffers of 32 steps in shared memory, second kernel
constexpr int kCopyBytes = 16;  // bytes of one asynchronous copy
constexpr bool kPdl = false;              // programmatic dependent launch
constexpr bool kPacked = kgen::kPresent<Offset>;

struct Config {
    using W = ::W;
    using U = ::U;
    static constexpr auto kForm = kgen::DecayForm::raw;  // of w
    static constexpr bool kPerStep = true;                  // w is [B, T, H, K], not [H, K]
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr int kGroups = 3;  // groups of warps, which take chunks in turn
    static constexpr int kVec = kCopyBytes / static_cast<int>(sizeof(Value));
    static constexpr int kTerms = 2;  // bf16 terms of the state's gradient in products with v and S
    static constexpr bool kRowCopies = false;  // copies and writes are of whole rows
    static constexpr int kSegments = ::kSegments;
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
                                         kCopyBytes, true, kPdl, kPacked>;
constexpr int kReduceThreads = 512;

static_assert(!kgen::kPresent<kgen::none>, "the gradient of a state is more accurate");

struct Shape {
    using Config = ::Config;
    using SumConfig = ::SumConfig;
    using States = ::States;
    using Offset = ::Offset;
    using Cut = kgen::wkv::EqualSegments<kSegments, kSegments - 1, 32>;
    static constexpr bool kFinalState = kgen::kPresent<kgen::none>;
};

using Gradients = kgen::wkv6::SegmentedGradients<Shape>;

template <class Target>
KGEN_DEVICE void sum_groups(i64 block, const float* parts, i64 N, i64 H, Target* to) {
    kgen::wkv::sum_chunks<kReduceThreads, kPdl>(block, parts, N, H, i64{Config::kK},
                                                i64{kSegments * Config::kGroups}, to);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Sums::kThreads, Sums::kMinBlocks)
wkv_segment_states(const Value* __restrict__ gy,           // [B, T, H, V]
                   const Value* __restrict__ r,            // [B, T, H, K]
                   const Value* __restrict__ k,            // [B, T, H, K]
                   const Value* __restrict__ v,            // [B, T, H, V]
                   const W* __restrict__ w,                // [B, T, H, K], or [H, K]
                   const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                   float* __restrict__ segment_sums,       // [2, N * H, segments - 1, K, V]
                   float* __restrict__ segment_decays,     // [2, N * H, segments - 1, K]
                   i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                   i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                   i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                   i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                   float scale) {
    const Rows<const W> w_rows{w, w_stride_B, w_stride_T, w_stride_H};
    // Blocks for the state and blocks for its gradient alternate, so that blocks that read the same w are near each
    // other.
    if (blockIdx.x % 2 == 0) {
        Gradients::sum_segments<false>({}, N, T, H, cu_seqlens, {k, k_stride_B, k_stride_T, k_stride_H},
                           {v, v_stride_B, v_stride_T, v_stride_H}, w_rows, segment_sums, segment_decays, 1.0f);
    } else {
        Gradients::sum_segments<true>({}, N, T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
                          {gy, gy_stride_B, gy_stride_T, gy_stride_H}, w_rows, segment_sums, segment_decays, scale);
    }
}

KGEN_EXPORT(wkv_segment_states);

extern "C" __global__ void __launch_bounds__(States::kThreads, 1)
wkv_backward_states(const Value* __restrict__ k,          // [B, T, H, K]
                    const Value* __restrict__ v,          // [B, T, H, V]
                    const W* __restrict__ w,              // [B, T, H, K], or [H, K]
                    const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                    const float* __restrict__ segment_sums,  // as above
                    const float* __restrict__ segment_decays,
                    u32* __restrict__ states,             // [chunks, K / 16, V / 16, 32, 4], pairs
                    i64 N, i64 T, i64 H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
                    i64 v_stride_B, i64 v_stride_T, i64 v_stride_H
                    , i64 w_stride_B, i64 w_stride_T, i64 w_stride_H
                    ) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const Rows<const W> w_rows{w, w_stride_B, w_stride_T, w_stride_H};
    Gradients::write_states({}, N, T, H, cu_seqlens, {k, k_stride_B, k_stride_T, k_stride_H},
                            {v, v_stride_B, v_stride_T, v_stride_H}, w_rows, segment_sums, segment_decays, states);
}

KGEN_EXPORT(wkv_backward_states);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 1)
wkv_backward_gradients(const Value* __restrict__ gy,            // [B, T, H, V]
                       const Value* __restrict__ r,             // [B, T, H, K]
                       const Value* __restrict__ k,             // [B, T, H, K]
                       const Value* __restrict__ v,             // [B, T, H, V]
                       const W* __restrict__ w,                 // [B, T, H, K], or [H, K]
                       const U* __restrict__ u,                 // [H, K]
                       const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
                       const Offset* __restrict__ cu_seqlens,   // [N + 1] or null
                       const float* __restrict__ segment_sums,  // as above
                       const float* __restrict__ segment_decays,
                       const u32* __restrict__ states,
                       Value* __restrict__ gr,                  // [B, T, H, K]
                       Value* __restrict__ gk,                  // [B, T, H, K]
                       Value* __restrict__ gv,                  // [B, T, H, V]
                       W* __restrict__ gw,                      // [B, T, H, K]
                       float* __restrict__ gu_parts,            // [N, H, segments, groups, K]
                       i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                       i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                       i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                       i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                       i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                       i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                       i64 gv_stride_H,
                       i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H,
                       float scale) {
    if constexpr (kPdl) {
        kgen::griddepcontrol_launch_dependents();
        kgen::griddepcontrol_wait(states, segment_sums, segment_decays);
    }
    const Gradients::Segment segment({}, cu_seqlens, N, T, H);
    const Span& span = segment.span;
    const i64 head = segment.head, h = segment.h;
    const Rows<const Value> gy_rows{gy, gy_stride_B, gy_stride_T, gy_stride_H};
    const Rows<const Value> r_rows{r, r_stride_B, r_stride_T, r_stride_H};
    const Rows<const W> w_rows{w, w_stride_B, w_stride_T, w_stride_H};
    const auto after = Gradients::gradient_after({}, segment, N, H, gy_rows, r_rows, w_rows, gfinal_state, segment_sums,
                                                 segment_decays, scale);
    const i64 parts = (head * kSegments + segment.segment) * Config::kGroups * Config::kK;
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
        step_rows(Rows<W>{gw, gw_stride_B, gw_stride_T, gw_stride_H}, span, h),
        gu_parts + parts, nullptr,
        scale};
    kgen::sync_block();
    Loop{shared}();
}

KGEN_EXPORT(wkv_backward_gradients);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gu_parts,  // [N, H, segments, groups, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 N, i64 H) {
    sum_groups(blockIdx.x, gu_parts, N, H, gu);
}

KGEN_EXPORT(wkv_backward_reduce);
