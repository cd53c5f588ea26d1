// digest: d6092e0804bd
// Rendered by kgen from templates/wkv/forward_block_per_head.cu.jinja
// config: block_per_head(split=4, tile=2, columns=16, tokens=1, stages=1, vec=2)
// problem: K=64, V=64, dtype=fp16, w_dtype=fp32, u_dtype=fp16, initial_state_dtype=fp32, final_state_dtype=fp32, cu_seqlens_dtype=none, decay_form=raw
// wkv5 and wkv6 forward, a block per head and kColumns value features: the state stays in registers while the
// block loops over the steps; rows of r, k, v and w come through shared memory, kTokens steps per barrier.
//
// Shared memory and barriers: kgen/wkv/state_columns.cuh.
#include "kgen/wkv/state_columns.cuh"

namespace {

using Value = kgen::fp16;
using W = float;
using U = kgen::fp16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv::Rows;
using kgen::wkv::step_pointer;

constexpr int kK = 64;
constexpr int kV = 64;

struct Config {
    using Value = ::Value;
    using W = ::W;
    using U = ::U;
    static constexpr bool kPerStep = false;  // w is [B, T, H, K], not [H, K]
    static constexpr kgen::DecayForm kForm = kgen::DecayForm::raw;  // of w
    static constexpr int kSplit = 4;      // threads that share a column of the state
    static constexpr int kTile = 2;        // columns of a thread
    static constexpr int kColumns = 16;  // columns of a block
    static constexpr int kTokens = 1;    // steps per barrier
    static constexpr int kStages = 1;    // buffers of kTokens steps in shared memory
    static constexpr int kVec = 2;          // elements per copy
};

using Loop = kgen::wkv::StateColumns<Config, kgen::Direction::forward, kK, true>;
constexpr bool kInitialState = kgen::kPresent<float>;
constexpr bool kFinalState = kgen::kPresent<float>;
constexpr int kValueBlocks = kgen::ceil_div(kV, Config::kColumns);

static_assert(kK % Config::kVec == 0 && kV % Config::kVec == 0, "copies must end with a row");

// One block computes kColumns value features of a head.
KGEN_DEVICE void forward(i64 T, i64 H, const Offset* cu_seqlens, Rows<const Value> r,
                         Rows<const Value> k, Rows<const Value> v, Rows<const W> w, const U* u,
                         const float* initial_state, Rows<Value> y, float* final_state,
                         float scale) {
    // 1. The block's sequence, head and value features.
    const i64 head = blockIdx.x / kValueBlocks, h = head % H, state = head * kK * kV;
    const kgen::wkv::Span span = kgen::wkv::span_of(cu_seqlens, head / H, T);
    const int value = static_cast<int>(blockIdx.x % kValueBlocks) * Config::kColumns;

    // 2. Step by step: y_t = scale * (S^T r_t + (sum_k r u k) v_t), then S = diag(d_t) S + k_t v_t^T.
    const Loop::Columns columns{value, kV};
    const Loop loop{columns,
                    span.steps,
                    step_pointer(r, span, h),
                    step_pointer(k, span, h),
                    step_pointer(v, span, h),
                    step_pointer(w, span, h),
                    u + h * kK,
                    1.0f,
                    scale};
    loop(initial_state ? initial_state + state : nullptr, kV, 1,
         final_state ? final_state + state : nullptr, y.head(span, h).first,
         y.stride_t, [](i64, Loop::State&) {});
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads)
wkv_forward(const Value* __restrict__ r,              // [B, T, H, K]
            const Value* __restrict__ k,              // [B, T, H, K]
            const Value* __restrict__ v,              // [B, T, H, V]
            const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
            const U* __restrict__ u,                  // [H, K]
            const float* __restrict__ initial_state,  // [N, H, K, V] or null
            const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
            Value* __restrict__ y,                    // [B, T, H, V]
            float* __restrict__ final_state,          // [N, H, K, V] or null
            i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
            i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
            i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    forward(T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
            {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
            kgen::wkv::same_at_every_step(w, kK),
            u, kInitialState ? initial_state : nullptr,
            {y, y_stride_B, y_stride_T, y_stride_H}, kFinalState ? final_state : nullptr, scale);
}

KGEN_EXPORT(wkv_forward);
