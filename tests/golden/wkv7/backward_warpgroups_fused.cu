// Rendered by kgen from templates/wkv7/backward_warpgroups_fused.cu.jinja
// config: warpgroups_fused(vec=8, min_blocks=2)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=clamp
// wkv7 backward in bf16, clamped decays, by two kernels. All sums are in a fixed order.
//
//     wkv7_backward_columns  sa, and the states before all chunks of 32 steps, forward in time
//     wkv7_backward_fused    all gradients, backward in time, by four warpgroups of a block per head (wgmma, sm_90a)
//
// Formulas, shared memory and barriers: kgen/wkv7/group_loop.cuh for the first kernel, kgen/wkv7/fused_loop.cuh for the
// second.
#include "kgen/wkv7/fused_loop.cuh"
#include "kgen/wkv7/group_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv7::dense_rows;
using kgen::wkv7::Rows;
using kgen::wkv7::step_pointer;

struct Config {
    using W = ::W;
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr auto kForm = kgen::wkv7::DecayForm::clamp;  // of w
    static constexpr int kVec = 8;  // elements per copy
    static constexpr bool kFinalState = kgen::kPresent<kgen::none>;
};

static_assert(!kgen::kPresent<kgen::none>, "the gradient of a state is more accurate");
static_assert(Config::kK % Config::kVec == 0 && Config::kV % Config::kVec == 0,
              "copies must end with a row");

using Loop = kgen::wkv7::FusedLoop<Config>;
using Pass = kgen::wkv7::ByQuotients<kgen::wkv7::ForwardSums>;
using Forward = kgen::wkv7::GroupLoop<Config, Pass, float, Loop::kChunk>;
constexpr int kSize = Config::kK * Config::kV;
constexpr int kValueBlocks = kgen::ceil_div(Config::kV, Forward::kColumns);
constexpr bool kPacked = kgen::kPresent<Offset>;

// The number of a head's first chunk among the chunks of all heads.
__device__ i64 first_chunk(const kgen::wkv7::Span& span, i64 head, i64 N, i64 T, i64 H) {
    return head % H * kgen::wkv7::head_chunks<Loop::kChunk, kPacked>(N, T) +
           kgen::wkv7::first_chunk<Loop::kChunk, kPacked>(span, head / H, T);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Forward::kThreads, 2)
wkv7_backward_columns(const W* __restrict__ w,            // [B, T, H, K]
                      const Value* __restrict__ k,        // [B, T, H, K]
                      const Value* __restrict__ v,        // [B, T, H, V]
                      const Value* __restrict__ a,        // [B, T, H, K]
                      const Value* __restrict__ b,        // [B, T, H, K]
                      const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                      float* __restrict__ sa,             // [B, T, H, V]
                      float* __restrict__ states,         // [H, chunks, K, V]
                      i64 N, i64 T, i64 H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H, i64 k_stride_B,
                      i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                      i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B, i64 b_stride_T,
                      i64 b_stride_H) {
    const i64 head = blockIdx.x / kValueBlocks, h = head % H;
    const auto span = kgen::wkv::span_of(cu_seqlens, head / H, T);
    const int first = static_cast<int>(blockIdx.x % kValueBlocks) * Forward::kColumns;
    const i64 chunk = first_chunk(span, head, N, T, H);
    const auto v_h = step_pointer(Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}, span, h);
    const auto k_h = step_pointer(Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}, span, h);
    // This loop does not read r; k stands in its place.
    const Forward loop{kgen::min(Config::kV - first, Forward::kColumns),
                       span.steps,
                       Config::kV,
                       k_h,
                       k_h,
                       step_pointer(Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}, span, h),
                       step_pointer(Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}, span, h),
                       {v_h.first + first, v_h.stride},
                       step_pointer(Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}, span, h),
                       1.0f,
                       0.0f,
                       states + chunk * kSize + first,
                       dense_rows(sa + first, T, H, Config::kV).head(span, h),
                       {nullptr, 0, 0, 0}};
    loop(nullptr);
}

KGEN_EXPORT(wkv7_backward_columns);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 1)
wkv7_backward_fused(const Value* __restrict__ gy,            // [B, T, H, V]
                    const Value* __restrict__ r,             // [B, T, H, K]
                    const W* __restrict__ w,                 // [B, T, H, K]
                    const Value* __restrict__ k,             // [B, T, H, K]
                    const Value* __restrict__ v,             // [B, T, H, V]
                    const Value* __restrict__ a,             // [B, T, H, K]
                    const Value* __restrict__ b,             // [B, T, H, K]
                    const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
                    const Offset* __restrict__ cu_seqlens,   // [N + 1] or null
                    Value* __restrict__ gr,                  // [B, T, H, K]
                    W* __restrict__ gw,                      // [B, T, H, K]
                    Value* __restrict__ gk,                  // [B, T, H, K]
                    Value* __restrict__ gv,                  // [B, T, H, V]
                    Value* __restrict__ ga,                  // [B, T, H, K]
                    Value* __restrict__ gb,                  // [B, T, H, K]
                    const float* __restrict__ sa,            // [B, T, H, V]
                    const float* __restrict__ states,        // [H, chunks, K, V]
                    i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
                    i64 r_stride_T, i64 r_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                    i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
                    i64 v_stride_H, i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B,
                    i64 b_stride_T, i64 b_stride_H, i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H,
                    i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H, i64 gk_stride_B, i64 gk_stride_T,
                    i64 gk_stride_H, i64 gv_stride_B, i64 gv_stride_T, i64 gv_stride_H, i64 ga_stride_B,
                    i64 ga_stride_T, i64 ga_stride_H, i64 gb_stride_B, i64 gb_stride_T, i64 gb_stride_H,
                    float scale) {
    Loop::run(N, T, H, [&](int block, i64 N, i64 T, i64 H) {
        const i64 head = block, h = head % H;
        const auto span = kgen::wkv::span_of(cu_seqlens, head / H, T);
        const i64 chunk = first_chunk(span, head, N, T, H);
        return Loop::Tensors{span.steps,
                            step_pointer(Rows<const Value>{gy, gy_stride_B, gy_stride_T, gy_stride_H}, span, h),
                            step_pointer(Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}, span, h),
                            step_pointer(Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}, span, h),
                            step_pointer(Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}, span, h),
                            step_pointer(Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}, span, h),
                            step_pointer(Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}, span, h),
                            step_pointer(Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}, span, h),
                            step_pointer(dense_rows(sa, T, H, Config::kV), span, h),
                            states + chunk * kSize,
                            Config::kFinalState ? gfinal_state + head * kSize : nullptr,
                            Rows<Value>{gr, gr_stride_B, gr_stride_T, gr_stride_H}.head(span, h),
                            Rows<Value>{gk, gk_stride_B, gk_stride_T, gk_stride_H}.head(span, h),
                            Rows<Value>{gv, gv_stride_B, gv_stride_T, gv_stride_H}.head(span, h),
                            Rows<Value>{ga, ga_stride_B, ga_stride_T, ga_stride_H}.head(span, h),
                            Rows<Value>{gb, gb_stride_B, gb_stride_T, gb_stride_H}.head(span, h),
                            Rows<W>{gw, gw_stride_B, gw_stride_T, gw_stride_H}.head(span, h),
                            scale};
    });
}

KGEN_EXPORT(wkv7_backward_fused);
