// digest: 44c3390f9c87
// Rendered by kgen from templates/wkv7/forward_warp_specialized_segments.cu.jinja
// config: warp_specialized_segments(warps=4, row_warps=4, stages=2, vec=8, min_blocks=2, quotients=1, segments=8, state_warps=8, warpgroups=1)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=clamp
// wkv7 forward for few heads: forward_warp_specialized with segments of T that run at the same time; bf16.
//
//     wkv7_segment_states  for each segment but the last: its transition matrix, and the state after it if the state
//                          before it is zero
//     wkv7_segment_scan    the state before each segment but the first
//     wkv7_forward         y; if an output is not finite, all steps up to it again, one by one
//
// Formulas, shared memory and barriers: kgen/wkv7/specialized_loop.cuh, kgen/wkv7/segments.cuh. With `warpgroups` the
// last kernel has the loop of forward_warpgroups (kgen/wkv7/group_loop.cuh), for sm_90a.
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/group_loop.cuh"
#include "kgen/wkv7/segments.cuh"
#include "kgen/wkv7/specialized_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv7::Rows;
using kgen::wkv7::Span;
using kgen::wkv::span_of;
using kgen::wkv7::step_pointer;

constexpr int kV = 64;
constexpr int kSegments = 8;        // segments of T
constexpr int kStateWarps = 8;   // consumers of the first kernel, 16 columns each
constexpr bool kInitialState = kgen::kPresent<kgen::none>;

template <int Warps, bool RowCopies = false>
struct ConfigOf {
    using W = ::W;
    static constexpr auto kForm = kgen::wkv7::DecayForm::clamp;
    static constexpr int kK = 64;
    static constexpr int kWarps = Warps;            // consumers, 16 columns of the state each
    static constexpr int kRowWarps = 4;  // producers
    static constexpr int kStages = 2;       // chunks of inputs in shared memory
    static constexpr int kVec = 8;             // elements per copy
    static constexpr bool kRowCopies = RowCopies;  // whether warps copy rows for each other
};

using Config = ConfigOf<4, 0 != 0>;
using OutputPass = kgen::wkv7::ByQuotients<kgen::wkv7::ForwardOutputs>;
using StatePass = kgen::wkv7::ByQuotients<kgen::wkv7::ForwardStates>;
using Loop = kgen::wkv7::GroupLoop<Config>;
using StateLoop = kgen::wkv7::SpecializedLoop<ConfigOf<kStateWarps>, StatePass>;
using Columns = kgen::wkv7::SegmentColumns<Config::kK, kV>;

constexpr int kScanThreads = 256;
constexpr int kValueBlocks = kgen::ceil_div(kV, Loop::kColumns);
constexpr int kStateBlocks = kgen::ceil_div(Columns::kTiles, kStateWarps);
constexpr i64 kStateSize = i64{Config::kK} * kV, kTransitionSize = i64{Config::kK} * Config::kK;

static_assert(!kgen::kPresent<kgen::none>, "a returned state is more accurate");
static_assert(Config::kK % Config::kVec == 0 && kV % Config::kVec == 0,
              "copies must end with a row");

template <class T>
KGEN_DEVICE kgen::StepPointer<T> rows_of(const T* tensor, i64 stride_B, i64 stride_T, i64 stride_H,
                                         const Span& span, i64 h) {
    return step_pointer(Rows<const T>{tensor, stride_B, stride_T, stride_H}, span, h);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(StateLoop::kThreads, 1)
wkv7_segment_states(const W* __restrict__ w,              // [B, T, H, K]
                    const Value* __restrict__ k,          // [B, T, H, K]
                    const Value* __restrict__ v,          // [B, T, H, V]
                    const Value* __restrict__ a,          // [B, T, H, K]
                    const Value* __restrict__ b,          // [B, T, H, K]
                    const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                    float* __restrict__ segment_states,   // [N * H, segments - 1, K, V]
                    float* __restrict__ transitions,      // [N * H, segments - 1, K, K], transposed
                    i64 T, i64 H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H, i64 k_stride_B,
                    i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                    i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B, i64 b_stride_T,
                    i64 b_stride_H) {
    const kgen::wkv7::SegmentBlock<kSegments, kSegments - 1, kStateBlocks> block(blockIdx.x);
    const int first_tile = block.columns * kStateWarps;
    // If the state before the first segment is zero, nothing reads that segment's transition matrix.
    if (!kInitialState && block.segment == 0 && first_tile >= Columns::kValueTiles) return;
    const i64 h = block.head % H;
    const Span span = block.own(span_of(cu_seqlens, block.head / H, T));
    const StateLoop loop{kV,
                         span.steps,
                         kV,
                         {nullptr, 0},
                         rows_of(k, k_stride_B, k_stride_T, k_stride_H, span, h),
                         rows_of(a, a_stride_B, a_stride_T, a_stride_H, span, h),
                         rows_of(b, b_stride_B, b_stride_T, b_stride_H, span, h),
                         rows_of(v, v_stride_B, v_stride_T, v_stride_H, span, h),
                         rows_of(w, w_stride_B, w_stride_T, w_stride_H, span, h),
                         1.0f,
                         1.0f,
                         nullptr,
                         {nullptr, 0, 0, 0},
                         {nullptr, 0, 0, 0}};
    loop.run_segment([&](int warp) {
        return Columns{first_tile + warp, segment_states + block.place() * kStateSize,
                       transitions + block.place() * kTransitionSize};
    });
}

KGEN_EXPORT(wkv7_segment_states);

extern "C" __global__ void __launch_bounds__(kScanThreads)
wkv7_segment_scan(const float* __restrict__ initial_state,  // [N, H, K, V] or null
                  const float* __restrict__ transitions,    // [N * H, segments - 1, K, K], transposed
                  float* __restrict__ segment_states) {     // [N * H, segments - 1, K, V]
    const i64 head = blockIdx.x / Columns::kValueTiles;
    const int first = static_cast<int>(blockIdx.x % Columns::kValueTiles) * 16;
    kgen::wkv7::scan_segments<Config::kK, kV, kSegments - 1, kScanThreads>(
        kInitialState ? initial_state + head * kStateSize + first : nullptr,
        transitions + head * (kSegments - 1) * kTransitionSize,
        segment_states + head * (kSegments - 1) * kStateSize + first, kV - first);
}

KGEN_EXPORT(wkv7_segment_scan);

extern "C" __global__ void __launch_bounds__(Loop::kThreads, 2)
wkv7_forward(const Value* __restrict__ r,              // [B, T, H, K]
             const W* __restrict__ w,                  // [B, T, H, K]
             const Value* __restrict__ k,              // [B, T, H, K]
             const Value* __restrict__ v,              // [B, T, H, V]
             const Value* __restrict__ a,              // [B, T, H, K]
             const Value* __restrict__ b,              // [B, T, H, K]
             const float* __restrict__ initial_state,  // [N, H, K, V] or null
             const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
             float* segment_states,                    // [N * H, segments - 1, K, V]
             Value* __restrict__ y,                    // [B, T, H, V]
             i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B,
             i64 w_stride_T, i64 w_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
             i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 a_stride_B, i64 a_stride_T,
             i64 a_stride_H, i64 b_stride_B, i64 b_stride_T, i64 b_stride_H, i64 y_stride_B,
             i64 y_stride_T, i64 y_stride_H, float scale) {
    // 1. The loop over steps of the block's head, and the states that it begins with.
    using Block = kgen::wkv7::SegmentBlock<kSegments, kSegments, kValueBlocks>;
    const auto loop_over = [&](const Block& block, const Span& span) {
        const i64 h = block.head % H;
        const int first = block.columns * Loop::kColumns;
        const auto v_h = rows_of(v, v_stride_B, v_stride_T, v_stride_H, span, h);
        const auto y_h = Rows<Value>{y, y_stride_B, y_stride_T, y_stride_H}.head(span, h);
        return Loop{kgen::min(kV - first, Loop::kColumns),
                    span.steps,
                    kV,
                    rows_of(r, r_stride_B, r_stride_T, r_stride_H, span, h),
                    rows_of(k, k_stride_B, k_stride_T, k_stride_H, span, h),
                    rows_of(a, a_stride_B, a_stride_T, a_stride_H, span, h),
                    rows_of(b, b_stride_B, b_stride_T, b_stride_H, span, h),
                    {v_h.first + first, v_h.stride},
                    rows_of(w, w_stride_B, w_stride_T, w_stride_H, span, h),
                    1.0f,
                    scale,
                    nullptr,
                    {nullptr, 0, 0, 0},
                    {y_h.first + first, y_h.stride_b, y_h.stride_t, y_h.stride_h}};
    };
    const auto initial = [&](const Block& block) -> const float* {
        if (!kInitialState) return nullptr;
        return initial_state + block.head * kStateSize + block.columns * Loop::kColumns;
    };
    const auto before = [&](const Block& block) {
        return segment_states + (block.place() - 1) * kStateSize + block.columns * Loop::kColumns;
    };

    const auto sequence = [&](const Block& block) { return span_of(cu_seqlens, block.head / H, T); };

    // 2. The segment. If an output is not finite, the block computes the segment's steps one by one, after all steps
    //    before them from the first step of the sequence on, with a thread per column.
    const Block block(blockIdx.x);
    const float* start = block.segment == 0 ? initial(block) : before(block);
    loop_over(block, block.own(sequence(block)))(start, [&] {
        const Block again(kgen::opaque(static_cast<int>(blockIdx.x)));  // takes no register in the loop
        if (again.segment > 0)
            loop_over(again, again.earlier(sequence(again)))
                .template run_steps<false>(initial(again), before(again));
        loop_over(again, again.own(sequence(again)))
            .template run_steps<true>(again.segment == 0 ? initial(again) : before(again), nullptr);
    });
}

KGEN_EXPORT(wkv7_forward);
