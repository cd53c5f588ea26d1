// Rendered by kgen from templates/linear_attention/backward_low_occupancy.cu.jinja
// config: low_occupancy(warps=8, rows=4, steps_per_group=1)
// problem: E=64, M=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, low_occupancy: for few heads. A CTA per column of a state processes many steps at once by
// a scan over time: gq forward, gk and gv backward in time. No sum goes across CTAs, so the result is deterministic.
#include "kgen/linear_attention/norm_gradient.cuh"

namespace {

using Value = float;
using kgen::i64;
using kgen::Direction;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kWarps = 8;
constexpr int kRows = 4;              // of a column, per thread
constexpr int kSteps = 1;  // consecutive steps of a group of threads

constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kInitialKeySum = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr bool kFinalKeySum = kgen::kPresent<kgen::none>;
constexpr bool kNorm = kgen::kPresent<kgen::none>;

// With a norm, the columns [M] of gq and gk have one more row for it.
using ColumnM = kgen::ColumnScan<kM, kRows, kSteps, kWarps, 1, true>;
using ColumnE = kgen::ColumnScan<kE, kRows, kSteps, kWarps, 1>;

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
linear_attention_backward(const Value* __restrict__ gout,             // [B, H, T, M]
                          const Value* __restrict__ q,                // [B, H, T, E]
                          const Value* __restrict__ k,                // [B, H, T, E]
                          const Value* __restrict__ v,                // [B, H, T, M]
                          const float* __restrict__ initial_state,    // [B, H, E, M] or null
                          const float* __restrict__ initial_key_sum,  // [B, H, E] or null
                          const float* __restrict__ norm,             // [B, H, T] or null
                          const float* __restrict__ gout_dot_out,     // [B, H, T] or null
                          const float* __restrict__ gfinal_state,     // [B, H, E, M] or null
                          const float* __restrict__ gfinal_key_sum,   // [B, H, E] or null
                          Value* __restrict__ gq,                     // [B, H, T, E]
                          Value* __restrict__ gk,                     // [B, H, T, E]
                          Value* __restrict__ gv,                     // [B, H, T, M]
                          float* __restrict__ ginitial_state,         // [B, H, E, M] or null
                          float* __restrict__ ginitial_key_sum,       // [B, H, E] or null
                          i64 B, i64 H, i64 steps, i64 gout_stride_B, i64 gout_stride_H,
                          i64 gout_stride_T, i64 q_stride_B, i64 q_stride_H, i64 q_stride_T,
                          i64 k_stride_B, i64 k_stride_H, i64 k_stride_T, i64 v_stride_B,
                          i64 v_stride_H, i64 v_stride_T, i64 gq_stride_B, i64 gq_stride_H,
                          i64 gq_stride_T, i64 gk_stride_B, i64 gk_stride_H, i64 gk_stride_T,
                          i64 gv_stride_B, i64 gv_stride_H, i64 gv_stride_T, float scale) {
    // CTAs: the columns of gq, then those of gk, then those of gv.
    const i64 of_e = B * H * kE;
    const i64 item = blockIdx.x;
    const int gradient = item < of_e ? 0 : item < 2 * of_e ? 1 : 2;
    const i64 column_index = item - gradient * of_e;
    const int features = gradient == 2 ? kM : kE;
    const i64 head = column_index / features, n = column_index % features, b = head / H, h = head % H;
    const i64 state_start = head * kE * kM;

    const kgen::StepPointer<Value> steps_g{gout + b * gout_stride_B + h * gout_stride_H, gout_stride_T};
    const kgen::StepPointer<Value> steps_q{q + b * q_stride_B + h * q_stride_H, q_stride_T};
    const kgen::StepPointer<Value> steps_k{k + b * k_stride_B + h * k_stride_H, k_stride_T};
    const kgen::StepPointer<Value> steps_v{v + b * v_stride_B + h * v_stride_H, v_stride_T};
    const auto factors =
        kgen::norm_gradient(kNorm ? norm : nullptr, gout_dot_out, head * steps, scale);
    const auto at = [&](const kgen::StepPointer<Value>& rows, i64 t) {
        return kgen::to_float(rows.first[t * rows.stride + n]);
    };
    float* scratch = kgen::dynamic_smem<float>();

    if (gradient == 0) {
        ColumnM column(scratch);
        column.load(0, kInitialState ? initial_state + state_start + n * kM : nullptr, 1);
        if constexpr (kInitialKeySum) column.extra = initial_key_sum[column_index];
        Value* results = gq + b * gq_stride_B + h * gq_stride_H + n;
        column.template run<Direction::forward>(
            steps, steps_g, steps_v,
            [&](i64 t, float (&c)[1], float& extra) {
                c[0] = at(steps_k, t);
                extra = c[0];
            },
            [&](i64 t, const float (&y)[1], float extra) {
                const kgen::f32x2 by = factors(t);
                float result = y[0] * by.x;
                if constexpr (kNorm) result = kgen::fma(by.y, extra, result);
                results[t * gq_stride_T] = kgen::from_float<Value>(result);
            });
    } else if (gradient == 1) {
        ColumnM column(scratch);
        column.load(0, kFinalState ? gfinal_state + state_start + n * kM : nullptr, 1);
        if constexpr (kFinalKeySum) column.extra = gfinal_key_sum[column_index];
        Value* results = gk + b * gk_stride_B + h * gk_stride_H + n;
        column.template run<Direction::backward>(
            steps, steps_v, steps_g,
            [&](i64 t, float (&c)[1], float& extra) {
                const kgen::f32x2 by = factors(t);
                const float query = at(steps_q, t);
                c[0] = query * by.x;
                extra = kNorm ? query * by.y : 0.0f;
            },
            [&](i64 t, const float (&y)[1], float extra) {
                results[t * gk_stride_T] = kgen::from_float<Value>(y[0] + extra);
            });
        if constexpr (kInitialKeySum) {
            if (threadIdx.x == 0) ginitial_key_sum[column_index] = column.extra;
        }
    } else {
        ColumnE column(scratch);
        column.load(0, kFinalState ? gfinal_state + state_start + n : nullptr, kM);
        Value* results = gv + b * gv_stride_B + h * gv_stride_H + n;
        column.template run<Direction::backward>(
            steps, steps_k, steps_q,
            [&](i64 t, float (&c)[1], float&) { c[0] = at(steps_g, t) * factors(t).x; },
            [&](i64 t, const float (&y)[1], float) {
                results[t * gv_stride_T] = kgen::from_float<Value>(y[0]);
            });
        if constexpr (kInitialState) column.store(0, ginitial_state + state_start + n, kM);
    }
}

KGEN_EXPORT(linear_attention_backward);
