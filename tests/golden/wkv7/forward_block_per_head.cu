// Rendered by kgen from templates/wkv7/forward_block_per_head.cu.jinja
// config: block_per_head(split=4, tile=4, columns=64, tokens=8, stages=2, vec=8)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=clamp
// wkv7 forward, a block per head and kColumns value features: the state stays in registers while the block loops over
// the steps; rows of r, w, k, v, a and b come through shared memory, kTokens steps per barrier.
//
// Shared memory and barriers: kgen/wkv7/value_columns.cuh.
#include "kgen/wkv7/value_columns.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv7::Rows;
using kgen::wkv7::step_pointer;

struct Config {
    using Value = ::Value;
    using W = ::W;
    static constexpr int kK = 64;
    static constexpr auto kForm = kgen::wkv7::DecayForm::clamp;  // of w
    static constexpr int kSplit = 4;      // threads that share a column of the state
    static constexpr int kTile = 4;        // columns of a thread
    static constexpr int kColumns = 64;  // columns of a block
    static constexpr int kTokens = 8;    // steps per barrier
    static constexpr int kStages = 2;    // buffers of kTokens steps in shared memory
    static constexpr int kVec = 8;          // elements per copy
};

constexpr int kV = 64;
constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr int kValueBlocks = kgen::ceil_div(kV, Config::kColumns);

using Loop = kgen::wkv7::ValueColumns<Config, kgen::wkv7::ForwardStep<true>>;

static_assert(Config::kK % Config::kVec == 0 && kV % Config::kVec == 0,
              "copies must end with a row");

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads)
wkv7_forward(const Value* __restrict__ r,              // [B, T, H, K]
             const W* __restrict__ w,                  // [B, T, H, K]
             const Value* __restrict__ k,              // [B, T, H, K]
             const Value* __restrict__ v,              // [B, T, H, V]
             const Value* __restrict__ a,              // [B, T, H, K]
             const Value* __restrict__ b,              // [B, T, H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
             Value* __restrict__ y,                    // [B, T, H, V]
             float* __restrict__ final_state,          // [N, H, K, V] or null
             i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B,
             i64 w_stride_T, i64 w_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
             i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 a_stride_B, i64 a_stride_T,
             i64 a_stride_H, i64 b_stride_B, i64 b_stride_T, i64 b_stride_H, i64 y_stride_B,
             i64 y_stride_T, i64 y_stride_H, float scale) {
    // 1. The block's sequence, head and columns.
    const i64 head = blockIdx.x / kValueBlocks, h = head % H, state = head * Config::kK * kV;
    const auto span = kgen::wkv::span_of(cu_seqlens, head / H, T);
    const Loop::Columns columns{static_cast<int>(blockIdx.x % kValueBlocks) * Config::kColumns, kV};
    const auto r_rows = Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H};
    const auto w_rows = Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H};
    const auto k_rows = Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H};
    const auto v_rows = Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H};
    const auto a_rows = Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H};
    const auto b_rows = Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H};
    const auto y_h = Rows<Value>{y, y_stride_B, y_stride_T, y_stride_H}.head(span, h);

    // 2. The loop.
    const Loop loop{columns,
                    span.steps,
                    {step_pointer(a_rows, span, h), step_pointer(b_rows, span, h),
                     step_pointer(k_rows, span, h), step_pointer(r_rows, span, h)},
                    step_pointer(v_rows, span, h),
                    step_pointer(w_rows, span, h),
                    1.0f};
    loop(kInitialState ? initial_state + state : nullptr,
         kFinalState ? final_state + state : nullptr, [](i64, const Loop::State&) {},
         [&](i64 t, int column, float, float read) {
             y_h.at(t)[column] = kgen::from_float<Value>(scale * read);
         });
}

KGEN_EXPORT(wkv7_forward);
