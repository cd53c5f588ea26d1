// digest: ea335781cfc6
// Rendered by kgen from templates/wkv7/backward_warp_specialized_segments.cu.jinja
// config: warp_specialized_segments(warps=4, row_warps=4, stages=2, vec=8, min_blocks=2, chunk=32, chunk_warps=4, chunk_blocks=2, state_bytes=2, quotients=1, segments=4, state_warps=4, state_blocks=2, state_row_warps=4)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=clamp
// wkv7 backward for few heads: backward_warp_specialized with segments of T that run at the same time; bf16.
//
//     wkv7_segment_states    forward in time: the transition matrix of each segment, and the state after it if the
//                            state before it is zero; backward in time, by other blocks: the gradient before the
//                            segment if the gradient after it is zero
//     wkv7_segment_scan      the state before each segment, and the gradient of the state after it
//     wkv7_backward_columns  tensor cores: sa and the states before all chunks; gsa, gv and the gradients of the states
//                            after all chunks; if one is not finite, all steps that lead to it again, one by one
//     wkv7_backward_rows     tensor cores: gr, gw, gk, ga and gb, all chunks in parallel
//
// Formulas, shared memory and barriers: kgen/wkv7/segments.cuh, kgen/wkv7/specialized_loop.cuh,
// kgen/wkv7/chunk_rows.cuh.
#include "kgen/primitives/registers.cuh"
#include "kgen/wkv7/quotient_rows.cuh"
#include "kgen/wkv7/segments.cuh"
#include "kgen/wkv7/specialized_loop.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using State = kgen::fp16;  // dtype of the states in workspaces, which have scales
using kgen::i64;
using kgen::wkv7::dense_rows;
using kgen::wkv7::Rows;
using kgen::wkv7::Span;
using kgen::wkv::span_of;
using kgen::wkv7::step_pointer;

constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr int kSegments = 4;        // segments of T
constexpr int kStateWarps = 4;   // consumers of the first kernel, 16 columns each
constexpr int kStateRowWarps = 4;  // producers of the first kernel

template <int Warps, int RowWarps, bool RowCopies = false>
struct ConfigOf {
    using Value = ::Value;
    using W = ::W;
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr auto kForm = kgen::wkv7::DecayForm::clamp;  // of w
    static constexpr int kWarps = Warps;       // consumers, 16 columns of the state each
    static constexpr int kRowWarps = RowWarps; // producers
    static constexpr int kStages = 2;  // chunks of inputs in shared memory
    static constexpr int kVec = 8;        // elements per copy
    static constexpr bool kRowCopies = RowCopies;  // whether warps copy rows for each other
    static constexpr int kSteps = 32;    // steps of a chunk of wkv7_backward_rows
};
using Config = ConfigOf<4, 4, 0 != 0>;

// Configuration of wkv7_backward_rows.
struct RowsConfig : Config {
    static constexpr int kRowWarps = 4;  // warps of a block, with 16 keys each
    static constexpr int kRowChunks = 1;   // chunks of a block, one after the other
};

static_assert(sizeof(W) == 2, "gradients of steps are bf16");
static_assert(!kgen::kPresent<kgen::none>, "the gradient of a state is more accurate");
static_assert(Config::kK % Config::kVec == 0 && Config::kV % Config::kVec == 0,
              "copies must end with a row");
constexpr i64 kSize = i64{Config::kK} * Config::kV, kTransitionSize = i64{Config::kK} * Config::kK;
constexpr bool kPacked = kgen::kPresent<Offset>;

template <class Pass>
using PassOf = kgen::wkv7::ByQuotients<Pass, 0 != 0>;
using Forward = kgen::wkv7::SpecializedLoop<Config, PassOf<kgen::wkv7::ForwardSums>, State,
                                            0 != 0, Config::kSteps>;
using Backward = kgen::wkv7::SpecializedLoop<Config, PassOf<kgen::wkv7::BackwardSums>, State,
                                             0 != 0, Config::kSteps>;
constexpr int kValueBlocks = kgen::ceil_div(Config::kV, Forward::kColumns);

// The first kernel. Blocks that compute gradients have no columns of transition matrices, and may have fewer consumers.
using Columns = kgen::wkv7::SegmentColumns<Config::kK, Config::kV>;
using GradientColumns = kgen::wkv7::GradientColumns<Config::kK, Config::kV>;
constexpr int kGradientWarps = kgen::min(kStateWarps, Columns::kValueTiles);
constexpr int kStateBlocks = kgen::ceil_div(Columns::kTiles, kStateWarps);
constexpr int kGradientBlocks = kgen::ceil_div(Columns::kValueTiles, kGradientWarps);
using StateLoop = kgen::wkv7::SpecializedLoop<ConfigOf<kStateWarps, kStateRowWarps>,
                                              PassOf<kgen::wkv7::ForwardSumStates>, float, 0 != 0>;
using GradientLoop = kgen::wkv7::SpecializedLoop<ConfigOf<kGradientWarps, kStateRowWarps>,
                                                 PassOf<kgen::wkv7::BackwardSumStates>, float, 0 != 0>;

constexpr int kScanThreads = 256;

// The segment of a block of one direction. Segments begin where chunks of wkv7_backward_rows begin.
template <int Launched, int PerSegment>
using SegmentBlock = kgen::wkv::SegmentBlock<kSegments, Launched, PerSegment, Config::kSteps>;

template <class T>
KGEN_DEVICE kgen::StepPointer<T> rows_of(const T* tensor, i64 stride_B, i64 stride_T, i64 stride_H,
                                         const Span& span, i64 h) {
    return step_pointer(Rows<const T>{tensor, stride_B, stride_T, stride_H}, span, h);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(StateLoop::kThreads, 2)
wkv7_segment_states(const Value* __restrict__ gy,            // [B, T, H, V]
                    const Value* __restrict__ r,             // [B, T, H, K]
                    const W* __restrict__ w,                 // [B, T, H, K]
                    const Value* __restrict__ k,             // [B, T, H, K]
                    const Value* __restrict__ v,             // [B, T, H, V]
                    const Value* __restrict__ a,             // [B, T, H, K]
                    const Value* __restrict__ b,             // [B, T, H, K]
                    const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
                    const Offset* __restrict__ cu_seqlens,   // [N + 1] or null
                    float* __restrict__ segment_states,      // [N * H, segments - 1, K, V]
                    float* __restrict__ segment_gradients,   // [N * H, segments - 1, K, V]
                    float* __restrict__ transitions,         // [N * H, segments - 1, K, K], transposed
                    i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B,
                    i64 r_stride_T, i64 r_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                    i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
                    i64 v_stride_H, i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B,
                    i64 b_stride_T, i64 b_stride_H, float scale) {
    // 1. Blocks that compute gradients come first, as in wkv7_backward_columns.
    const int gradient_blocks =
        static_cast<int>(gridDim.x) / (kStateBlocks + kGradientBlocks) * kGradientBlocks;
    const int number = static_cast<int>(blockIdx.x);
    if (number < gradient_blocks) {
        // 2a. Backward in time: all segments but the first.
        if (kgen::thread_rank() >= GradientLoop::kThreads) return;
        SegmentBlock<kSegments - 1, kGradientBlocks> block(number);
        const i64 place = block.place(), h = block.head % H;
        ++block.segment;
        const Span span = block.own(span_of(cu_seqlens, block.head / H, T));
        const bool last = block.segment == kSegments - 1;
        const GradientLoop loop{Config::kV,
                                span.steps,
                                Config::kV,
                                rows_of(r, r_stride_B, r_stride_T, r_stride_H, span, h),
                                rows_of(k, k_stride_B, k_stride_T, k_stride_H, span, h),
                                rows_of(a, a_stride_B, a_stride_T, a_stride_H, span, h),
                                rows_of(b, b_stride_B, b_stride_T, b_stride_H, span, h),
                                rows_of(gy, gy_stride_B, gy_stride_T, gy_stride_H, span, h),
                                rows_of(w, w_stride_B, w_stride_T, w_stride_H, span, h),
                                scale,
                                1.0f,
                                nullptr,
                                {nullptr, 0, 0, 0},
                                {nullptr, 0, 0, 0}};
        loop.run_segment([&](int warp) {
            return GradientColumns{block.columns * kGradientWarps + warp,
                                   kFinalState && last ? gfinal_state + block.head * kSize : nullptr,
                                   segment_gradients + place * kSize};
        });
        return;
    }
    // 2b. Forward in time: all segments but the last. Nothing reads the first segment's transition matrix.
    const SegmentBlock<kSegments - 1, kStateBlocks> block(number - gradient_blocks);
    const int first_tile = block.columns * kStateWarps;
    if (block.segment == 0 && first_tile >= Columns::kValueTiles) return;
    const i64 h = block.head % H;
    const Span span = block.own(span_of(cu_seqlens, block.head / H, T));
    const StateLoop loop{Config::kV,
                         span.steps,
                         Config::kV,
                         rows_of(r, r_stride_B, r_stride_T, r_stride_H, span, h),
                         rows_of(k, k_stride_B, k_stride_T, k_stride_H, span, h),
                         rows_of(a, a_stride_B, a_stride_T, a_stride_H, span, h),
                         rows_of(b, b_stride_B, b_stride_T, b_stride_H, span, h),
                         rows_of(v, v_stride_B, v_stride_T, v_stride_H, span, h),
                         rows_of(w, w_stride_B, w_stride_T, w_stride_H, span, h),
                         1.0f,
                         0.0f,
                         nullptr,
                         {nullptr, 0, 0, 0},
                         {nullptr, 0, 0, 0}};
    loop.run_segment([&](int warp) {
        return Columns{first_tile + warp, segment_states + block.place() * kSize,
                       transitions + block.place() * kTransitionSize};
    });
}

KGEN_EXPORT(wkv7_segment_states);

extern "C" __global__ void __launch_bounds__(kScanThreads)
wkv7_segment_scan(const float* __restrict__ transitions,    // [N * H, segments - 1, K, K], transposed
                  float* __restrict__ segment_states,       // [N * H, segments - 1, K, V]
                  float* __restrict__ segment_gradients) {  // [N * H, segments - 1, K, V]
    constexpr int kSums = kSegments - 1;
    const kgen::wkv7::DirectionBlock<Columns::kValueTiles> block;
    const int first = 16 * block.number, width = Config::kV - first;
    const float* of_head = transitions + block.head * kSums * kTransitionSize;
    const i64 place = block.head * kSums * kSize + first;
    if (block.back) {
        kgen::wkv7::scan_segments<Config::kK, Config::kV, kSums, kScanThreads, kgen::Direction::backward>(
            nullptr, of_head, segment_gradients + place, width);
    } else {
        kgen::wkv7::scan_segments<Config::kK, Config::kV, kSums, kScanThreads>(nullptr, of_head,
                                                                             segment_states + place, width);
    }
}

KGEN_EXPORT(wkv7_segment_scan);

extern "C" __global__ void __launch_bounds__(Forward::kThreads, 2)
wkv7_backward_columns(const Value* __restrict__ gy,             // [B, T, H, V]
                      const Value* __restrict__ r,              // [B, T, H, K]
                      const W* __restrict__ w,                  // [B, T, H, K]
                      const Value* __restrict__ k,              // [B, T, H, K]
                      const Value* __restrict__ v,              // [B, T, H, V]
                      const Value* __restrict__ a,              // [B, T, H, K]
                      const Value* __restrict__ b,              // [B, T, H, K]
                      const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                      const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
                      Value* __restrict__ gv,                   // [B, T, H, V]
                      float* __restrict__ sa,                   // [B, T, H, V]
                      float* __restrict__ gsa,                  // [B, T, H, V]
                      State* __restrict__ states,               // [H, chunks, K, V]
                      State* __restrict__ gradients,            // [H, chunks, K, V]
                      float* segment_states,                    // [N * H, segments - 1, K, V]
                      float* segment_gradients,                 // [N * H, segments - 1, K, V]
                      i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                      i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B,
                      i64 w_stride_T, i64 w_stride_H, i64 k_stride_B, i64 k_stride_T,
                      i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                      i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B,
                      i64 b_stride_T, i64 b_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                      i64 gv_stride_H, float scale) {
    // 1. The block's direction, and the loops over steps of its head.
    using Block = SegmentBlock<kSegments, kValueBlocks>;
    const int half = static_cast<int>(gridDim.x / 2);
    const auto sequence = [&](const Block& block) { return span_of(cu_seqlens, block.head / H, T); };
    const auto before = [&](const Block& block) {
        return segment_states + (block.place() - 1) * kSize + block.columns * Forward::kColumns;
    };
    const auto behind = [&](const Block& block) {
        return segment_gradients + block.place() * kSize + block.columns * Forward::kColumns;
    };
    const auto final_gradient = [&](const Block& block) -> const float* {
        if (!kFinalState) return nullptr;
        return gfinal_state + block.head * kSize + block.columns * Forward::kColumns;
    };
    // count: the number of chunks of all heads. chunk_of: the number of the first chunk of `span` among them.
    const auto count = [&] { return H * kgen::wkv7::head_chunks<Config::kSteps, kPacked>(N, T); };
    const auto chunk_of = [&](const Block& block, const Span& span) {
        const Span all = sequence(block);
        return block.head % H * kgen::wkv7::head_chunks<Config::kSteps, kPacked>(N, T) +
               kgen::wkv7::first_chunk<Config::kSteps, kPacked>(all, block.head / H, T) +
               (span.first - all.first) / Config::kSteps;
    };
    const auto forward = [&](const Block& block, const Span& span) {
        const i64 h = block.head % H, chunk = chunk_of(block, span);
        const int first = block.columns * Forward::kColumns;
        const auto v_h = rows_of(v, v_stride_B, v_stride_T, v_stride_H, span, h);
        float* const scales = kgen::wkv7::scales_of(states, count(), kSize) + chunk * Config::kV + first;
        return Forward{kgen::min(Config::kV - first, Forward::kColumns),
                       span.steps,
                       Config::kV,
                       rows_of(r, r_stride_B, r_stride_T, r_stride_H, span, h),
                       rows_of(k, k_stride_B, k_stride_T, k_stride_H, span, h),
                       rows_of(a, a_stride_B, a_stride_T, a_stride_H, span, h),
                       rows_of(b, b_stride_B, b_stride_T, b_stride_H, span, h),
                       {v_h.first + first, v_h.stride},
                       rows_of(w, w_stride_B, w_stride_T, w_stride_H, span, h),
                       1.0f,
                       0.0f,
                       states + chunk * kSize + first,
                       dense_rows(sa + first, T, H, Config::kV).head(span, h),
                       {nullptr, 0, 0, 0}, scales};
    };
    const auto backward = [&](const Block& block, const Span& span) {
        const i64 h = block.head % H, chunk = chunk_of(block, span);
        const int first = block.columns * Forward::kColumns;
        const auto gy_h = rows_of(gy, gy_stride_B, gy_stride_T, gy_stride_H, span, h);
        float* const scales = kgen::wkv7::scales_of(gradients, count(), kSize) + chunk * Config::kV + first;
        return Backward{kgen::min(Config::kV - first, Forward::kColumns),
                        span.steps,
                        Config::kV,
                        rows_of(r, r_stride_B, r_stride_T, r_stride_H, span, h),
                        rows_of(k, k_stride_B, k_stride_T, k_stride_H, span, h),
                        rows_of(a, a_stride_B, a_stride_T, a_stride_H, span, h),
                        rows_of(b, b_stride_B, b_stride_T, b_stride_H, span, h),
                        {gy_h.first + first, gy_h.stride},
                        rows_of(w, w_stride_B, w_stride_T, w_stride_H, span, h),
                        scale,
                        1.0f,
                        gradients + chunk * kSize + first,
                        dense_rows(gsa + first, T, H, Config::kV).head(span, h),
                        Rows<Value>{gv + first, gv_stride_B, gv_stride_T, gv_stride_H}.head(span, h), scales};
    };

    // 2. The segment. If an output is not finite, the block computes the segment's steps one by one, after all steps
    //    that lead to its start, from an end of the sequence on, with a thread per column. Only the segment's own steps
    //    have outputs; gv of the other steps goes to the segment's first row, which the same threads write again.
    const auto block_of = [&](int number) { return Block(number < half ? number : number - half); };
    const int number = static_cast<int>(blockIdx.x);
    const Block block = block_of(number);
    if (number >= half) {
        const float* start = block.segment == 0 ? nullptr : before(block);
        forward(block, block.own(sequence(block)))(start, [&] {
            const Block again = block_of(kgen::opaque(number));  // takes no register in the loop
            const float* outset = nullptr;
#pragma unroll 1
            for (int own = again.segment == 0; own < 2; ++own) {
                const Span all = sequence(again);
                Forward steps = forward(again, own ? again.own(all) : again.earlier(all));
                if (!own) steps.without_outputs(steps.second);
                steps.template run_steps<false, false>(outset, own ? nullptr : before(again));
                outset = before(again);
            }
        });
    } else {
        const float* start = block.segment == kSegments - 1 ? final_gradient(block) : behind(block);
        backward(block, block.own(sequence(block)))(start, [&] {
            const Block again = block_of(kgen::opaque(number));  // takes no register in the loop
            const float* outset = final_gradient(again);
#pragma unroll 1
            for (int own = again.segment == kSegments - 1; own < 2; ++own) {
                const Span all = sequence(again);
                Backward steps = backward(again, again.own(all));
                if (!own) {
                    const auto second = steps.second;
                    steps = backward(again, again.later(all));
                    steps.without_outputs({second.first, 0, 0, 0});
                }
                steps.template run_steps<true, false>(outset, own ? nullptr : behind(again));
                outset = behind(again);
            }
        });
    }
}

KGEN_EXPORT(wkv7_backward_columns);

extern "C" __global__ void __launch_bounds__(kgen::wkv7::QuotientRows<RowsConfig>::kThreads, 2)
wkv7_backward_rows(const Value* __restrict__ gy,           // [B, T, H, V]
                   const Value* __restrict__ r,            // [B, T, H, K]
                   const W* __restrict__ w,                // [B, T, H, K]
                   const Value* __restrict__ k,            // [B, T, H, K]
                   const Value* __restrict__ v,            // [B, T, H, V]
                   const Value* __restrict__ a,            // [B, T, H, K]
                   const Value* __restrict__ b,            // [B, T, H, K]
                   const Offset* __restrict__ cu_seqlens,  // [N + 1] or null
                   Value* __restrict__ gr,                 // [B, T, H, K]
                   W* __restrict__ gw,                     // [B, T, H, K]
                   Value* __restrict__ gk,                 // [B, T, H, K]
                   Value* __restrict__ ga,                 // [B, T, H, K]
                   Value* __restrict__ gb,                 // [B, T, H, K]
                   const float* __restrict__ sa,           // [B, T, H, V]
                   const float* __restrict__ gsa,          // [B, T, H, V]
                   const State* __restrict__ states,       // [H, chunks, K, V]
                   const State* __restrict__ gradients,    // [H, chunks, K, V]
                   i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                   i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B, i64 w_stride_T,
                   i64 w_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
                   i64 v_stride_T, i64 v_stride_H, i64 a_stride_B, i64 a_stride_T, i64 a_stride_H,
                   i64 b_stride_B, i64 b_stride_T, i64 b_stride_H, i64 gr_stride_B,
                   i64 gr_stride_T, i64 gr_stride_H, i64 gw_stride_B, i64 gw_stride_T,
                   i64 gw_stride_H, i64 gk_stride_B, i64 gk_stride_T, i64 gk_stride_H,
                   i64 ga_stride_B, i64 ga_stride_T, i64 ga_stride_H, i64 gb_stride_B,
                   i64 gb_stride_T, i64 gb_stride_H, float scale) {
    kgen::wkv7::backward_quotient_rows<RowsConfig, State>(
        cu_seqlens, N, T, H,
        {
         {gy, gy_stride_B, gy_stride_T, gy_stride_H},
         {r, r_stride_B, r_stride_T, r_stride_H},
         {k, k_stride_B, k_stride_T, k_stride_H},
         {v, v_stride_B, v_stride_T, v_stride_H},
         {a, a_stride_B, a_stride_T, a_stride_H},
         {b, b_stride_B, b_stride_T, b_stride_H},
         {w, w_stride_B, w_stride_T, w_stride_H},
         sa,
         gsa,
         states,
         gradients,
         {gr, gr_stride_B, gr_stride_T, gr_stride_H},
         {gk, gk_stride_B, gk_stride_T, gk_stride_H},
         {ga, ga_stride_B, ga_stride_T, ga_stride_H},
         {gb, gb_stride_B, gb_stride_T, gb_stride_H},
         {gw, gw_stride_B, gw_stride_T, gw_stride_H}},
        scale);
}

KGEN_EXPORT(wkv7_backward_rows);
