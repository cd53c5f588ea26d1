// digest: e69287947399
// Rendered by kgen from templates/wkv7/forward_warpgroups.cu.jinja
// config: warpgroups(vec=8, min_blocks=2)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=clamp
// wkv7 forward by two warpgroups, in chunks of 32 steps on tensor cores (wgmma, sm_90a); bf16, clamped decays.
//
// Formulas, shared memory and barriers: kgen/wkv7/group_loop.cuh.
#include "kgen/wkv7/group_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv7::Rows;
using kgen::wkv7::step_pointer;

constexpr int kV = 64;
constexpr bool kInitialState = kgen::kPresent<kgen::none>;

struct Config {
    using W = ::W;
    static constexpr auto kForm = kgen::wkv7::DecayForm::clamp;
    static constexpr int kK = 64;
    static constexpr int kVec = 8;  // elements per copy
};

using Loop = kgen::wkv7::GroupLoop<Config>;

constexpr int kValueBlocks = kgen::ceil_div(kV, Loop::kColumns);

static_assert(!kgen::kPresent<kgen::none>, "a returned state is more accurate");
static_assert(Config::kK % Config::kVec == 0 && kV % Config::kVec == 0,
              "copies must end with a row");

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 2)
wkv7_forward(const Value* __restrict__ r,              // [B, T, H, K]
             const W* __restrict__ w,                  // [B, T, H, K]
             const Value* __restrict__ k,              // [B, T, H, K]
             const Value* __restrict__ v,              // [B, T, H, V]
             const Value* __restrict__ a,              // [B, T, H, K]
             const Value* __restrict__ b,              // [B, T, H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
             Value* __restrict__ y,                    // [B, T, H, V]
             i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B,
             i64 w_stride_T, i64 w_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
             i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 a_stride_B, i64 a_stride_T,
             i64 a_stride_H, i64 b_stride_B, i64 b_stride_T, i64 b_stride_H, i64 y_stride_B,
             i64 y_stride_T, i64 y_stride_H, float scale) {
    // 1. The block's sequence, head and columns.
    const i64 head = blockIdx.x / kValueBlocks, h = head % H, state = head * Config::kK * kV;
    const auto span = kgen::wkv::span_of(cu_seqlens, head / H, T);
    const int first = static_cast<int>(blockIdx.x % kValueBlocks) * Loop::kColumns;
    const auto r_rows = Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H};
    const auto w_rows = Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H};
    const auto k_rows = Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H};
    const auto v_rows = Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H};
    const auto a_rows = Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H};
    const auto b_rows = Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H};
    const auto y_h = Rows<Value>{y, y_stride_B, y_stride_T, y_stride_H}.head(span, h);

    // 2. The loop.
    const auto v_h = step_pointer(v_rows, span, h);
    const Loop loop{kgen::min(kV - first, Loop::kColumns),
                    span.steps,
                    kV,
                    step_pointer(r_rows, span, h),
                    step_pointer(k_rows, span, h),
                    step_pointer(a_rows, span, h),
                    step_pointer(b_rows, span, h),
                    {v_h.first + first, v_h.stride},
                    step_pointer(w_rows, span, h),
                    1.0f,
                    scale,
                    nullptr,
                    {nullptr, 0, 0, 0},
                    {y_h.first + first, y_h.stride_b, y_h.stride_t, y_h.stride_h}};
    loop(kInitialState ? initial_state + state + first : nullptr);
}

KGEN_EXPORT(wkv7_forward);
