// digest: dea5769d1f8f
// Rendered by kgen from templates/wkv/forward_warp_specialized_segments.cu.jinja
// config: warp_specialized_segments(warps=4, row_warps=2, stages=2, vec=8, min_blocks=2, powers=true, fixed_parts=true, r_terms=2, segments=4, pdl=true)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=raw
// wkv5 and wkv6 forward for few heads: forward_warp_specialized with segments of T that run at the same time; bf16.
//
//     wkv_segment_states  what each segment but the last adds to the state, and the segment's product of decays
//     wkv_forward         y of a segment; if an output is not finite, the block computes all steps of the sequence up
//                         to the segment's end again, one by one
//
// Formulas, shared memory and barriers: kgen/wkv6/segmented_forward.cuh.
#include "kgen/wkv6/segmented_forward.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;

struct Inputs {
    using W = ::W;
    using U = ::U;
    static constexpr auto kForm = kgen::DecayForm::raw;
    static constexpr bool kPerStep = false;
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr int kVec = 8;  // elements per copy
};

struct StateConfig : Inputs {
    static constexpr int kColumns = kgen::min(kV, 64);  // value features of a block
    static constexpr bool kExact = false;
    static constexpr int kStages = 4;     // chunks of 32 steps in shared memory
};

struct Config : Inputs {
    static constexpr int kWarps = 4;         // consumers, 16 value features each
    static constexpr int kRowWarps = 2;  // producers
    static constexpr int kStages = 2;       // chunks of inputs in shared memory
    static constexpr bool kPowers = true;      // powers of decays from a table
    static constexpr bool kFixedParts = true;  // the producers' parts of a chunk are unrolled
    static constexpr int kRTerms = 2;      // bf16 terms of rows of r with decays
    static constexpr bool kRowCopies = false;  // copies are of whole rows
    static constexpr bool kFinalState = false;
};

struct Shape {
    using Config = ::Config;
    using StateConfig = ::StateConfig;
    using Offset = ::Offset;
    using Cut = kgen::wkv::EqualSegments<4, 4 - 1, 32>;  // of T; summed up; steps of a chunk
    static constexpr bool kPdl = true;           // programmatic dependent launch
    static constexpr bool kInitialState = kgen::kPresent<kgen::none>;
};

using Forward = kgen::wkv6::SegmentedForward<Shape>;
using States = Forward::States;
using Loop = Forward::Loop;

static_assert(!kgen::kPresent<kgen::none>, "a returned state is more accurate");

}  // namespace

extern "C" __global__ void __launch_bounds__(States::kThreads, States::kMinBlocks)
wkv_segment_states(const Value* __restrict__ k,            // [B, T, H, K]
                   const Value* __restrict__ v,            // [B, T, H, V]
                   const W* __restrict__ w,                // [B, T, H, K], or [H, K]
                   const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                   float* __restrict__ segment_states,     // [N * H, segments - 1, K, V]
                   float* __restrict__ segment_decays,     // [N * H, segments - 1, K]
                   i64 T, i64 H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
                   i64 v_stride_T, i64 v_stride_H) {
    Forward::sum_segment({}, T, H, cu_seqlens, {k, k_stride_B, k_stride_T, k_stride_H},
                {v, v_stride_B, v_stride_T, v_stride_H},
                kgen::wkv::same_at_every_step(w, Config::kK),
                segment_states, segment_decays);
}

KGEN_EXPORT(wkv_segment_states);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 2)
wkv_forward(const Value* __restrict__ r,               // [B, T, H, K]
            const Value* __restrict__ k,               // [B, T, H, K]
            const Value* __restrict__ v,               // [B, T, H, V]
            const W* __restrict__ w,                   // [B, T, H, K], or [H, K]
            const U* __restrict__ u,                   // [H, K]
            const float* __restrict__ initial_state,   // [N, H, K, V] or null
            const Offset* __restrict__ cu_seqlens,     // [N + 1] or null
            const float* __restrict__ segment_states,  // [N * H, segments - 1, K, V]
            const float* __restrict__ segment_decays,  // [N * H, segments - 1, K]
            Value* __restrict__ y,                     // [B, T, H, V]
            i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 k_stride_B,
            i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
            i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    Forward::forward({}, T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
            {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
            kgen::wkv::same_at_every_step(w, Config::kK),
            u, initial_state, segment_states, segment_decays,
            {y, y_stride_B, y_stride_T, y_stride_H}, nullptr, scale);
}

KGEN_EXPORT(wkv_forward);
