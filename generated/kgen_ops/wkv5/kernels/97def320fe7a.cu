// digest: 97def320fe7a
// Rendered by kgen from templates/wkv/backward_chunk_halving.cu.jinja
// config: chunk_halving(copy_bytes=16, min_blocks=1, groups=3, stages=3, gradient_terms=1)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=raw
// wkv5 and wkv6 backward by halving chunks of 16 steps, on tensor cores; bf16, also w. All sums are in a fixed order.
//
//     wkv_backward_states     loops over the steps with the state, and writes it before every 16 steps
//     wkv_backward_gradients  one block per sequence and head: loops backward over its chunks, all gradients
//     wkv_backward_reduce     gu, and wkv5's gw
//
// Formulas, shared memory and barriers: kgen/wkv/state_loop.cuh, kgen/wkv6/gradient_loop.cuh.
#include "kgen/wkv/chunk_memory.cuh"
#include "kgen/wkv/reduce.cuh"
#include "kgen/wkv/state_loop.cuh"
#include "kgen/wkv6/gradient_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::u32;
using kgen::wkv::Rows;
using kgen::wkv::step_pointer;
using kgen::wkv::step_rows;

constexpr int kStages = 3;         // buffers of 32 steps in shared memory, first kernel
constexpr int kCopyBytes = 16;  // bytes of one asynchronous copy
constexpr bool kPdl = false;              // programmatic dependent launch
constexpr bool kPacked = kgen::kPresent<Offset>;

struct Config {
    using W = ::W;
    using U = ::U;
    static constexpr auto kForm = kgen::DecayForm::raw;  // of w
    static constexpr bool kPerStep = false;                  // w is [B, T, H, K], not [H, K]
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr int kGroups = 3;  // groups of warps, which take chunks in turn
    static constexpr int kVec = kCopyBytes / static_cast<int>(sizeof(Value));
    static constexpr int kTerms = 1;  // bf16 terms of the state's gradient in products with v and S
    static constexpr bool kRowCopies = false;  // copies and writes are of whole rows
    static constexpr int kSegments = 1;
};

using Loop = kgen::wkv6::GradientLoop<Config>;
using States = kgen::wkv::BackwardConfig<Value, W, Config::kForm, Config::kPerStep, false, Config::kK,
                                         Config::kV, 32, 16 * kgen::ceil_div(Config::kV, 16), kStages,
                                         kCopyBytes, true, kPdl, kPacked>;
constexpr int kReduceThreads = 512;

static_assert(!kgen::kPresent<kgen::none>, "the gradient of a state is more accurate");

// A sequence, and its first chunk of 16 steps in a workspace [H, chunk slots], or [N, H, chunks].
struct Sequence {
    kgen::wkv::Span span;
    i64 chunk;

    KGEN_DEVICE Sequence(const Offset* cu_seqlens, i64 n, i64 h, i64 N, i64 T, i64 H)
        : span(kgen::wkv::span_of(cu_seqlens, n, T)) {
        chunk = kPacked ? h * (T / 16 + N) + kgen::wkv::first_chunk_slot<16>(span.first, n)
                        : (n * H + h) * kgen::ceil_div(T, i64{16});
    }
};

template <class Target>
KGEN_DEVICE void sum_groups(i64 block, const float* parts, i64 N, i64 H, Target* to) {
    kgen::wkv::sum_chunks<kReduceThreads, kPdl>(block, parts, N, H, i64{Config::kK}, i64{Config::kGroups}, to);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(States::kThreads, 1)
wkv_backward_states(const Value* __restrict__ k,          // [B, T, H, K]
                    const Value* __restrict__ v,          // [B, T, H, V]
                    const W* __restrict__ w,              // [B, T, H, K], or [H, K]
                    const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                    u32* __restrict__ states,             // [chunks, K / 16, V / 16, 32, 4], pairs
                    i64 N, i64 T, i64 H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
                    i64 v_stride_B, i64 v_stride_T, i64 v_stride_H
                    ) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const Rows<const W> w_rows = kgen::wkv::same_at_every_step(w, Config::kK);
    const i64 head = blockIdx.x, n = head / H, h = head % H;
    const Sequence sequence(cu_seqlens, n, h, N, T, H);
    const auto& span = sequence.span;
    using StateLoop = kgen::wkv::StateLoop<States, true>;
    const int warp = kgen::thread_rank() / kgen::kWarpSize;
    StateLoop{step_rows(Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}, span, h),
              step_rows(Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}, span, h), step_rows(w_rows, span, h),
              sequence.span.steps, Config::kV, 1.0f}
        .template run<false>(nullptr,
                             states + sequence.chunk * Loop::kStateWords +
                                 warp * (Loop::kStateWords / Loop::kWarps),
                             Loop::kStateWords, States::kTiles, nullptr);
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
                       const u32* __restrict__ states,          // as above
                       Value* __restrict__ gr,                  // [B, T, H, K]
                       Value* __restrict__ gk,                  // [B, T, H, K]
                       Value* __restrict__ gv,                  // [B, T, H, V]
                       float* __restrict__ gw_parts,            // [N, H, groups, K]
                       float* __restrict__ gu_parts,            // [N, H, groups, K]
                       i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                       i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B, i64 k_stride_T,
                       i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                       i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                       i64 gk_stride_T, i64 gk_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                       i64 gv_stride_H,
                       float scale) {
    if constexpr (kPdl) {
        kgen::griddepcontrol_launch_dependents();
        kgen::griddepcontrol_wait(states);
    }
    const i64 head = blockIdx.x, n = head / H, h = head % H;
    const Sequence sequence(cu_seqlens, n, h, N, T, H);
    const auto& span = sequence.span;
    constexpr int kSize = Config::kK * Config::kV, kParts = Config::kGroups * Config::kK;
    const bool final_state = kgen::kPresent<kgen::none> && gfinal_state != nullptr;
    __shared__ Loop::Head shared;
    if (kgen::thread_rank() == 0) shared = {
        sequence.span.steps,
        step_pointer(Rows<const Value>{gy, gy_stride_B, gy_stride_T, gy_stride_H}, span, h),
        step_pointer(Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}, span, h),
        step_pointer(Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}, span, h),
        step_pointer(Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}, span, h),
        step_pointer(kgen::wkv::same_at_every_step(w, Config::kK), span, h),
        u + h * Config::kK,
        {final_state ? gfinal_state + head * kSize : nullptr},
        states + sequence.chunk * Loop::kStateWords,
        step_rows(Rows<Value>{gr, gr_stride_B, gr_stride_T, gr_stride_H}, span, h),
        step_rows(Rows<Value>{gk, gk_stride_B, gk_stride_T, gk_stride_H}, span, h),
        step_rows(Rows<Value>{gv, gv_stride_B, gv_stride_T, gv_stride_H}, span, h),
        {},
        gu_parts + head * kParts, gw_parts + head * kParts,
        scale};
    kgen::sync_block();
    Loop{shared}();
}

KGEN_EXPORT(wkv_backward_gradients);

extern "C" __global__ void __launch_bounds__(kReduceThreads)
wkv_backward_reduce(
                    const float* __restrict__ gw_parts,  // [N, H, groups, K]
                    const float* __restrict__ gu_parts,  // [N, H, groups, K]
                    W* __restrict__ gw,                  // [H, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 N, i64 H) {
    const i64 blocks = Config::kPerStep ? gridDim.x : gridDim.x / 2, block = blockIdx.x;  // gu, then gw
    if (block < blocks) sum_groups(block, gu_parts, N, H, gu);
    if (block >= blocks) sum_groups(block - blocks, gw_parts, N, H, gw);
}

KGEN_EXPORT(wkv_backward_reduce);
