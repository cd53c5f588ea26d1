// digest: 2fc2960aa62e
// Rendered by kgen from templates/wkv/forward_warp_specialized.cu.jinja
// config: warp_specialized(warps=4, row_warps=4, stages=4, vec=8, min_blocks=2, fixed_parts=true, row_copies=true)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=int32, decay_form=log
// wkv5 and wkv6 forward by producer and consumer warps, in chunks of 16 steps on tensor cores; bf16.
//
// Formulas, shared memory and barriers: kgen/wkv6/specialized_loop.cuh.
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv/tensors.cuh"
#include "kgen/wkv6/specialized_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Offset = kgen::i32;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv::Rows;
using kgen::wkv::step_rows;

constexpr int kV = 64;

struct Config {
    using W = ::W;
    using U = ::U;
    static constexpr auto kForm = kgen::DecayForm::log;
    static constexpr bool kPerStep = true;
    static constexpr int kK = 64;
    static constexpr int kV = ::kV;
    static constexpr int kWarps = 4;         // consumers, 16 value features each
    static constexpr int kRowWarps = 4;  // producers
    static constexpr int kStages = 4;       // chunks of inputs in shared memory
    static constexpr int kVec = 8;             // elements per copy
    static constexpr bool kPowers = false;      // powers of decays from a table
    static constexpr bool kFixedParts = true;  // the producers' parts of a chunk are unrolled
    static constexpr int kRTerms = 1;      // bf16 terms of rows of r with decays
    static constexpr bool kFinalState = false;
    static constexpr bool kRowCopies = true;  // copies are of whole rows
};

using Loop = kgen::wkv6::SpecializedLoop<Config>;

constexpr int kValueBlocks = kgen::ceil_div(kV, Loop::kColumns);

static_assert(!kgen::kPresent<kgen::none>, "a returned state is more accurate");
static_assert(Config::kK % Config::kVec == 0 && kV % Config::kVec == 0,
              "copies must end with a row");

// One block computes kColumns value features of a head.
KGEN_DEVICE void forward(i64 T, i64 H, const Offset* cu_seqlens, Rows<const Value> r,
                         Rows<const Value> k, Rows<const Value> v, Rows<const W> w, const U* u,
                         const float* initial_state, Rows<Value> y, float scale) {
    // 1. The loop over the steps of a block's sequence, head and value features.
    const auto loop_of = [&](i64 block) {
        const i64 head = block / kValueBlocks, h = head % H;
        const auto span = kgen::wkv::span_of(cu_seqlens, head / H, T);
        const int value = static_cast<int>(block % kValueBlocks) * Loop::kColumns;
        kgen::RecurrenceStates states{};
        if (kgen::kPresent<kgen::none>)
            states.initial_state = initial_state + head * Config::kK * kV + value;
        states.initial_key_stride = kV;
        states.initial_value_stride = 1;
        const kgen::RecurrenceRows<Value> rows{
            step_rows(r, span, h), step_rows(k, span, h),
            step_rows(v, span, h).from(value), step_rows(y, span, h).from(value),
            0, span.steps, kgen::min(kV - value, Loop::kColumns), scale, 1.0f};
        return Loop{rows, states, {step_rows(w, span, h), u + h * Config::kK}};
    };

    // 2. Run the loop of this block.
    const Loop loop = loop_of(blockIdx.x);
    if constexpr (Config::kRowCopies) {
        loop([](kgen::RecurrenceStates&) {}, [&] {
            // Computed again, so that it takes no registers during the loop.
            const Loop again = loop_of(kgen::opaque(static_cast<int>(blockIdx.x)));
            again.run_steps(again.states);
        });
    } else {
        loop();
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 2)
wkv_forward(const Value* __restrict__ r,              // [B, T, H, K]
            const Value* __restrict__ k,              // [B, T, H, K]
            const Value* __restrict__ v,              // [B, T, H, V]
            const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
            const U* __restrict__ u,                  // [H, K]
            const float* __restrict__ initial_state,  // [N, H, K, V] or null
            const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
            Value* __restrict__ y,                    // [B, T, H, V]
            i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
            i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
            i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
            i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    forward(T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
            {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
            {w, w_stride_B, w_stride_T, w_stride_H},
            u, initial_state, {y, y_stride_B, y_stride_T, y_stride_H}, scale);
}

KGEN_EXPORT(wkv_forward);
