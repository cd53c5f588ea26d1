// Rendered by kgen from templates/wkv7/backward_warp_specialized_fp64.cu.jinja
// config: warp_specialized_fp64(warps=4, row_warps=4, vec=8, min_blocks=1, chunk_warps=4, chunk_blocks=2)
// problem: K=64, V=64, dtype=bf16, w_dtype=bf16, initial_state_dtype=none, final_state_dtype=none, cu_seqlens_dtype=none, decay_form=clamp
// wkv7 backward in chunks of 16 steps on fp64 tensor cores, any decay. All sums are in a fixed order.
//
//     wkv7_backward_columns  sa and the states before all chunks, forward in time; gsa, gv, the gradients of the states
//                            after all chunks and that of the initial state, backward in time, by other blocks of the
//                            same launch
//     wkv7_backward_rows     gr, gw, gk, ga and gb, all chunks in parallel
//
// Formulas, shared memory and barriers: kgen/wkv7/f64_loop.cuh, kgen/wkv7/f64_producer.cuh, kgen/wkv7/f64_rows.cuh.
#include "kgen/wkv7/f64_loop.cuh"
#include "kgen/wkv7/f64_rows.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using Offset = kgen::none;  // none: a batch row is a sequence
using kgen::i64;
using kgen::wkv7::dense_rows;
using kgen::wkv7::Rows;
using kgen::wkv7::step_pointer;

constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;

struct Config {
    using Value = ::Value;
    using W = ::W;
    static constexpr int kK = 64;
    static constexpr int kV = 64;
    static constexpr auto kForm = kgen::wkv7::DecayForm::clamp;  // of w
    static constexpr int kSteps = 16;               // steps of a chunk
    static constexpr int kWarps = 4;         // consumers of the first kernel, 16 value features each
    static constexpr int kRowWarps = 4;  // producers of the first kernel
    static constexpr int kVec = 8;             // elements per load
};

// Configuration of wkv7_backward_rows.
struct RowsConfig : Config {
    static constexpr int kRowWarps = 4;  // warps of a block, with 16 keys each
};

constexpr int kSize = Config::kK * Config::kV;
constexpr bool kPacked = kgen::kPresent<Offset>;

using Forward = kgen::wkv7::F64Loop<Config, kgen::Direction::forward>;
using Backward = kgen::wkv7::F64Loop<Config, kgen::Direction::backward>;
constexpr int kValueBlocks = kgen::ceil_div(Config::kV, Forward::kColumns);

static_assert(Config::kK % Config::kVec == 0 && Config::kV % Config::kVec == 0,
              "copies must end with a row");

}  // namespace

extern "C" __global__ void __launch_bounds__(Forward::kThreads, 1)
wkv7_backward_columns(const Value* __restrict__ gy,             // [B, T, H, V]
                      const Value* __restrict__ r,              // [B, T, H, K]
                      const W* __restrict__ w,                  // [B, T, H, K]
                      const Value* __restrict__ k,              // [B, T, H, K]
                      const Value* __restrict__ v,              // [B, T, H, V]
                      const Value* __restrict__ a,              // [B, T, H, K]
                      const Value* __restrict__ b,              // [B, T, H, K]
                      const float* __restrict__ initial_state,  // [N, H, K, V] or null
                      const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                      const Offset* __restrict__ cu_seqlens,    // [N + 1] or null
                      Value* __restrict__ gv,                   // [B, T, H, V]
                      float* __restrict__ ginitial_state,       // [N, H, K, V] or null
                      float* __restrict__ sa,                   // [B, T, H, V]
                      float* __restrict__ gsa,                  // [B, T, H, V]
                      float* __restrict__ states,               // [H, chunks, K, V]
                      float* __restrict__ gradients,            // [H, chunks, K, V]
                      i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                      i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B,
                      i64 w_stride_T, i64 w_stride_H, i64 k_stride_B, i64 k_stride_T,
                      i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                      i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B,
                      i64 b_stride_T, i64 b_stride_H, i64 gv_stride_B, i64 gv_stride_T,
                      i64 gv_stride_H, float scale) {
    // 1. The block's sequence, head, direction and columns.
    const kgen::wkv7::DirectionBlock<kValueBlocks> block;
    const i64 head = block.head, n = head / H, h = head % H;
    const auto span = kgen::wkv::span_of(cu_seqlens, n, T);
    const int first = block.number * Forward::kColumns;
    const int width = kgen::min(Config::kV - first, Forward::kColumns);
    const auto w_h = step_pointer(Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}, span, h);
    const auto k_h = step_pointer(Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}, span, h);
    const auto a_h = step_pointer(Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}, span, h);
    const auto b_h = step_pointer(Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}, span, h);
    const i64 first_chunk = h * kgen::wkv7::head_chunks<Config::kSteps, kPacked>(N, T) +
                            kgen::wkv7::first_chunk<Config::kSteps, kPacked>(span, n, T);

    const auto r_h = step_pointer(Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}, span, h);

    if (!block.back) {
        // 2a. Forward in time.
        const auto v_h =
            step_pointer(Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}, span, h);
        const auto sa_h = dense_rows(sa + first, T, H, Config::kV).head(span, h);
        const Forward loop{width, span.steps, Config::kV, r_h, k_h, a_h, b_h,
                           {v_h.first + first, v_h.stride}, w_h, 1.0f, 0.0f,
                           states + first_chunk * kSize + first, sa_h, {nullptr, 0, 0, 0}};
        loop(kInitialState ? initial_state + head * kSize + first : nullptr, nullptr);
    } else {
        // 2b. Backward in time.
        const auto gy_h =
            step_pointer(Rows<const Value>{gy, gy_stride_B, gy_stride_T, gy_stride_H}, span, h);
        const auto gsa_h = dense_rows(gsa + first, T, H, Config::kV).head(span, h);
        const auto gv_h =
            Rows<Value>{gv + first, gv_stride_B, gv_stride_T, gv_stride_H}.head(span, h);
        const Backward loop{width, span.steps, Config::kV, r_h, k_h, a_h, b_h,
                            {gy_h.first + first, gy_h.stride}, w_h, scale, 1.0f,
                            gradients + first_chunk * kSize + first, gsa_h, gv_h};
        loop(kFinalState ? gfinal_state + head * kSize + first : nullptr,
             kInitialState ? ginitial_state + head * kSize + first : nullptr);
    }
}

KGEN_EXPORT(wkv7_backward_columns);

extern "C" __global__ void __launch_bounds__(kgen::wkv7::F64Rows<RowsConfig>::kThreads, 2)
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
                   const float* __restrict__ states,       // [H, chunks, K, V]
                   const float* __restrict__ gradients,    // [H, chunks, K, V]
                   i64 N, i64 T, i64 H, i64 gy_stride_B, i64 gy_stride_T, i64 gy_stride_H,
                   i64 r_stride_B, i64 r_stride_T, i64 r_stride_H, i64 w_stride_B, i64 w_stride_T,
                   i64 w_stride_H, i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
                   i64 v_stride_T, i64 v_stride_H, i64 a_stride_B, i64 a_stride_T, i64 a_stride_H,
                   i64 b_stride_B, i64 b_stride_T, i64 b_stride_H, i64 gr_stride_B,
                   i64 gr_stride_T, i64 gr_stride_H, i64 gw_stride_B, i64 gw_stride_T,
                   i64 gw_stride_H, i64 gk_stride_B, i64 gk_stride_T, i64 gk_stride_H,
                   i64 ga_stride_B, i64 ga_stride_T, i64 ga_stride_H, i64 gb_stride_B,
                   i64 gb_stride_T, i64 gb_stride_H, float scale) {
    kgen::wkv7::backward_rows<kgen::wkv7::F64Rows<RowsConfig>>(
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
