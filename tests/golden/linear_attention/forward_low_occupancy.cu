// Rendered by kgen from templates/linear_attention/forward_low_occupancy.cu.jinja
// config: low_occupancy(warps=8, rows=4, steps_per_group=1)
// problem: E=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention forward, low_occupancy: for few heads. A CTA per column of the state processes many steps at once. A
// group of threads has the column's rows for steps_per_group steps; a scan over time adds the sums of earlier groups.
#include "kgen/linear_attention/norm_gradient.cuh"

namespace {

using Value = float;

constexpr int kE = 64;
constexpr int kWarps = 8;
constexpr int kRows = 4;              // of a column, per thread
constexpr int kSteps = 1;  // consecutive steps of a group of threads

constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kInitialKeySum = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr bool kFinalKeySum = kgen::kPresent<kgen::none>;
constexpr bool kNorm = kgen::kPresent<kgen::none>;
constexpr bool kKeySum = kNorm || kFinalKeySum;

using Column = kgen::ColumnScan<kE, kRows, kSteps, kWarps, kKeySum ? 2 : 1>;

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps)
linear_attention_forward(const Value* __restrict__ q,                // [B, H, T, E]
                         const Value* __restrict__ k,                // [B, H, T, E]
                         const Value* __restrict__ v,                // [B, H, T, M]
                         const float* __restrict__ initial_state,    // [B, H, E, M] or null
                         const float* __restrict__ initial_key_sum,  // [B, H, E] or null
                         Value* __restrict__ out,                    // [B, H, T, M]
                         float* __restrict__ final_state,            // [B, H, E, M] or null
                         float* __restrict__ final_key_sum,          // [B, H, E] or null
                         float* __restrict__ norm,                   // [B, H, T] or null
                         kgen::i64 H, kgen::i64 steps, kgen::i64 M,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale, float eps) {
    const kgen::i64 head = blockIdx.x / M, m = blockIdx.x % M, b = head / H, h = head % H;
    const kgen::i64 state_start = head * kE * M + m;

    // 1. The state before the first step; the key sum is the column of a value feature that is always 1.
    Column column(kgen::dynamic_smem<float>());
    column.load(0, kInitialState ? initial_state + state_start : nullptr, M);
    if constexpr (kKeySum)
        column.load(1, kInitialKeySum ? initial_key_sum + head * kE : nullptr, 1);

    // 2. The loop over time.
    const Value* values = v + b * v_stride_B + h * v_stride_H + m;
    Value* results = out + b * out_stride_B + h * out_stride_H + m;
    column.template run<kgen::Direction::forward>(
        steps, kgen::StepPointer<Value>{q + b * q_stride_B + h * q_stride_H, q_stride_T},
        kgen::StepPointer<Value>{k + b * k_stride_B + h * k_stride_H, k_stride_T},
        [&](kgen::i64 t, float (&c)[Column::kColumns], float&) {
            c[0] = kgen::to_float(values[t * v_stride_T]);
            if constexpr (kKeySum) c[1] = 1.0f;
        },
        [&](kgen::i64 t, const float (&y)[Column::kColumns], float) {
            float result = y[0] * scale;
            if constexpr (kNorm) {
                const float divisor = kgen::fma(scale, y[1], eps);
                result /= divisor;
                if (m == 0) norm[head * steps + t] = divisor;
            }
            results[t * out_stride_T] = kgen::from_float<Value>(result);
        });

    // 3. The state after the last step.
    if constexpr (kFinalState) column.store(0, final_state + state_start, M);
    if constexpr (kFinalKeySum) {
        if (m == 0) column.store(1, final_key_sum + head * kE, 1);
    }
}

KGEN_EXPORT(linear_attention_forward);
