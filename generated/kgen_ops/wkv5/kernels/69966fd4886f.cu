// digest: 69966fd4886f
// Rendered by kgen from templates/wkv/forward_warp_specialized_segments.cu.jinja
// config: warp_specialized_segments(warps=4, row_warps=4, stages=4, vec=8, min_blocks=2, fixed_parts=true, segments=8)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=log
// wkv5 and wkv6 forward for few heads: forward_warp_specialized with segments of T that run at the same time; bf16.
//
//     wkv_segment_states  what each segment but the last adds to the state, and the segment's product of decays
//     wkv_forward         y of a segment; if an output is not finite, the block computes all steps of the sequence up
//                         to the segment's end again, one by one
//
// Formulas, shared memory and barriers: kgen/wkv6/segment_states.cuh, kgen/wkv6/specialized_loop.cuh.
#include "kgen/primitives/pdl.cuh"
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv/segment_block.cuh"
#include "kgen/wkv6/segment_states.cuh"
#include "kgen/wkv6/specialized_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv::Rows;
using kgen::wkv::Span;
using kgen::wkv::span_of;
using kgen::wkv::step_pointer;
using kgen::wkv::step_rows;

constexpr int kV = 64;
constexpr int kSegments = 8;  // of T
constexpr bool kPdl = false;           // programmatic dependent launch
constexpr bool kInitialState = kgen::kPresent<kgen::none>;

struct Inputs {
    using W = ::W;
    using U = ::U;
    static constexpr auto kForm = kgen::DecayForm::log;
    static constexpr bool kPerStep = false;
    static constexpr int kK = 64;
    static constexpr int kV = ::kV;
    static constexpr int kVec = 8;  // elements per copy
};

struct StateConfig : Inputs {
    static constexpr int kColumns = kgen::min(kV, 64);  // value features of a block
    static constexpr int kStages = 4;     // chunks of 32 steps in shared memory
};

struct Config : Inputs {
    static constexpr int kWarps = 4;         // consumers, 16 value features each
    static constexpr int kRowWarps = 4;  // producers
    static constexpr int kStages = 4;       // chunks of inputs in shared memory
    static constexpr bool kPowers = false;      // powers of decays from a table
    static constexpr bool kFixedParts = true;  // the producers' parts of a chunk are unrolled
    static constexpr int kRTerms = 1;      // bf16 terms of rows of r with decays
    static constexpr bool kRowCopies = false;  // copies are of whole rows
};

using States = kgen::wkv6::SegmentStates<StateConfig>;
using Loop = kgen::wkv6::SpecializedLoop<Config>;

constexpr int kStateBlocks = kgen::ceil_div(kV, StateConfig::kColumns);
constexpr int kValueBlocks = kgen::ceil_div(kV, Loop::kColumns);
constexpr i64 kStateSize = i64{Config::kK} * kV;

// The place of a block in a launch with `Launched` segments per head and `Columns` blocks of value features.
template <int Launched, int Columns>
using SegmentBlock = kgen::wkv::SegmentBlock<kSegments, Launched, Columns, States::kChunk>;

static_assert(!kgen::kPresent<kgen::none>, "a returned state is more accurate");
static_assert(Config::kK % Config::kVec == 0 && kV % Config::kVec == 0,
              "copies must end with a row");

// The state before the steps that a block computes one by one: the initial state of the sequence, or the state that
// earlier steps left in shared memory.
struct StepStates {
    const float* initial_state;  // from the block's first value feature on, or null
    bool after_earlier_steps;
    float *final_state, *norm;  // null
    const float* bias;          // null
    float final_factor, eps;

    template <bool>
    KGEN_DEVICE float initial_at(int key, int value, int, int) const {
        if (after_earlier_steps) return kgen::dynamic_smem<float>()[key * Loop::kColumns + value];
        return kInitialState && initial_state != nullptr ? initial_state[key * kV + value] : 0.0f;
    }
    KGEN_DEVICE void store_final(int, int, float) const {}
};

// One block computes what a segment adds to the state, for up to 64 value features of a head.
KGEN_DEVICE void sum_segment(i64 T, i64 H, const Offset* cu_seqlens, Rows<const Value> k,
                             Rows<const Value> v, Rows<const W> w, float* segment_states,
                             float* segment_decays) {
    if constexpr (kPdl) kgen::griddepcontrol_launch_dependents();
    const SegmentBlock<kSegments - 1, kStateBlocks> block(blockIdx.x);
    const i64 h = block.head % H;
    const int value = block.columns * StateConfig::kColumns;
    const Span span = block.own(span_of(cu_seqlens, block.head / H, T));
    auto v_steps = step_pointer(v, span, h);
    v_steps.first += value;
    const States states{step_pointer(k, span, h), v_steps, step_pointer(w, span, h), span.steps,
                        kgen::min(kV - value, StateConfig::kColumns),
                        segment_states + block.place() * kStateSize + value,
                        block.columns == 0 ? segment_decays + block.place() * Config::kK : nullptr};
    states();
}

// One block computes y of a segment, kColumns value features of a head.
KGEN_DEVICE void forward(i64 T, i64 H, const Offset* cu_seqlens, const Rows<const Value>& r,
                         const Rows<const Value>& k, const Rows<const Value>& v,
                         const Rows<const W>& w, const U* u, const float* initial_state,
                         const float* segment_states, const float* segment_decays,
                         const Rows<Value>& y, float scale) {
    // 1. The loop over steps of the block's head, and the state before its segment.
    using Block = SegmentBlock<kSegments, kValueBlocks>;
    const auto loop_over = [&](const Block& block, const Span& span) {
        const i64 h = block.head % H;
        const int value = block.columns * Loop::kColumns;
        kgen::RecurrenceStates states{};
        if (kInitialState) states.initial_state = initial_state + block.head * kStateSize + value;
        states.initial_key_stride = kV;
        states.initial_value_stride = 1;
        states.segment_sums = segment_states + block.head * (kSegments - 1) * kStateSize + value;
        states.segment_key_sums = segment_decays + block.head * (kSegments - 1) * Config::kK;
        states.segments = block.segment;
        states.segment_stride = kStateSize;
        const kgen::RecurrenceRows<Value> rows{
            step_rows(r, span, h), step_rows(k, span, h),
            step_rows(v, span, h).from(value), step_rows(y, span, h).from(value),
            0, span.steps, kgen::min(kV - value, Loop::kColumns), scale, 1.0f};
        return Loop{rows, states, {step_rows(w, span, h), u + h * Config::kK}};
    };
    const auto sequence = [&](const Block& block) { return span_of(cu_seqlens, block.head / H, T); };

    // 2. The segment. If an output is not finite, the block computes the steps before the segment one by one, which
    //    gives the state before the segment, and then the segment's steps. The outputs of the steps before the segment
    //    go to the segment's first row, which is overwritten later.
    const auto wait = [](kgen::RecurrenceStates& states) {
        if constexpr (kPdl) kgen::griddepcontrol_wait(states.segment_sums, states.segment_key_sums);
    };
    const Block block(blockIdx.x);
    loop_over(block, block.own(sequence(block)))(wait, [&] {
        // Computed again, so that it takes no registers during the loop.
        const Block again(kgen::opaque(static_cast<int>(blockIdx.x)));
        const Loop own = loop_over(again, again.own(sequence(again)));
        StepStates states{};
        states.initial_state = own.states.initial_state;
        if (again.segment > 0) {
            Loop earlier = loop_over(again, again.earlier(sequence(again)));
            earlier.rows.out = {own.rows.out.rows, 0};
            earlier.run_steps(states);
            states.after_earlier_steps = true;
        }
        own.run_steps(states);
    });
}

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
    sum_segment(T, H, cu_seqlens, {k, k_stride_B, k_stride_T, k_stride_H},
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
    forward(T, H, cu_seqlens, {r, r_stride_B, r_stride_T, r_stride_H},
            {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
            kgen::wkv::same_at_every_step(w, Config::kK),
            u, initial_state, segment_states, segment_decays,
            {y, y_stride_B, y_stride_T, y_stride_H}, scale);
}

KGEN_EXPORT(wkv_forward);
