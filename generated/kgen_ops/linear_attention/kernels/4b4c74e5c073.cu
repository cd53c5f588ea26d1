// digest: 4b4c74e5c073
// Rendered by kgen from templates/linear_attention/forward_block_per_head.cu.jinja
// config: block_per_head(split=4, tile=4, columns=64, tokens=1, stages=1, vec=4)
// problem: E=64, M=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=fp32, initial_key_sum_dtype=none, final_state_dtype=fp32, final_key_sum_dtype=none, norm_dtype=none
// linear_attention forward, block_per_head: a CTA per head and block of columns loops over time with the state in
// registers; q, k and v come through shared memory, several steps per barrier.
#include "kgen/linear_attention/norm_gradient.cuh"

namespace {

using Value = float;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kSplit = 4;      // threads that share a column of the state
constexpr int kTile = 4;        // columns of a thread
constexpr int kColumns = 64;  // columns of a CTA
constexpr int kTokens = 1;    // steps per barrier
constexpr int kStages = 1;    // batches of kTokens steps in shared memory
constexpr int kVec = 4;          // elements per copy

constexpr bool kInitialState = kgen::kPresent<float>;
constexpr bool kInitialKeySum = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<float>;
constexpr bool kFinalKeySum = kgen::kPresent<kgen::none>;
constexpr bool kNorm = kgen::kPresent<kgen::none>;
constexpr bool kKeySum = kNorm || kFinalKeySum;

constexpr int kColumnThreads = kColumns / kTile;
constexpr int kThreads = kColumnThreads * kSplit;
constexpr int kValueBlocks = kgen::ceil_div(kM, kColumns);

using State = kgen::ThreadStateTile<kE, kSplit, kTile>;
using KeySum = kgen::ThreadStateTile<kE, kSplit, 1>;
using Ring =
    kgen::StepRing<Value, kThreads, State::kPitch, kColumns, kTokens, kStages, kVec>;

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, at most 1024 threads");
static_assert(kE % kVec == 0 && kM % kVec == 0, "a copy must not cross the end of a row");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
linear_attention_forward(const Value* __restrict__ q,                // [B, H, T, E]
                         const Value* __restrict__ k,                // [B, H, T, E]
                         const Value* __restrict__ v,                // [B, H, T, M]
                         const float* __restrict__ initial_state,    // [B, H, E, M] or null
                         const float* __restrict__ initial_key_sum,  // [B, H, E] or null
                         Value* __restrict__ out,                    // [B, H, T, M]
                         float* __restrict__ final_state,            // [B, H, E, M] or null
                         float* __restrict__ final_key_sum,          // [B, H, E] or null
                         float* __restrict__ norm,                   // [B, H, T] or null
                         kgen::i64 H, kgen::i64 steps,
                         kgen::i64 q_stride_B, kgen::i64 q_stride_H, kgen::i64 q_stride_T,
                         kgen::i64 k_stride_B, kgen::i64 k_stride_H, kgen::i64 k_stride_T,
                         kgen::i64 v_stride_B, kgen::i64 v_stride_H, kgen::i64 v_stride_T,
                         kgen::i64 out_stride_B, kgen::i64 out_stride_H, kgen::i64 out_stride_T,
                         float scale, float eps) {
    const kgen::i64 item = blockIdx.x;
    const kgen::i64 head = item / kValueBlocks, b = head / H, h = head % H;
    const int column_block = static_cast<int>(item % kValueBlocks);
    const int first = column_block * kColumns;  // column of the CTA
    const int lane = static_cast<int>(threadIdx.x) % kSplit;
    const int group = static_cast<int>(threadIdx.x) / kSplit;

    // Adjacent threads have adjacent columns; the columns of one thread are kColumnThreads apart.
    const auto column = [&](int x) { return x * kColumnThreads + group; };
    const auto uses = [&](int x) { return first + column(x) < kM; };
    const auto only_first = [&](int) { return column_block == 0 && group == 0; };
    const auto always = [](int) { return true; };
    const auto column_offset = [&](int x) { return column(x); };
    const auto at_start = [](int) { return 0; };

    // 1. The state before the first step.
    State state;
    KeySum keys;
    const kgen::i64 state_start = head * kE * kM + first;
    state.load(kInitialState ? initial_state + state_start : nullptr, kM, uses, column_offset);
    if constexpr (kKeySum)
        keys.load(kInitialKeySum ? initial_key_sum + head * kE : nullptr, 1, always, at_start);

    // 2. The loop over time.
    Value* results = out + b * out_stride_B + h * out_stride_H + first;
    Ring::template run<kgen::Direction::forward>(
        steps, kE, kgen::min(kM - first, kColumns),
        {q + b * q_stride_B + h * q_stride_H, q_stride_T},
        {k + b * k_stride_B + h * k_stride_H, k_stride_T},
        {v + b * v_stride_B + h * v_stride_H + first, v_stride_T},
        [&](kgen::i64) { return kgen::f32x2{scale, 0.0f}; },
        [&](kgen::i64 t, const Value* q_t, const Value* k_t, const Value* v_t, kgen::f32x2) {
            float c[kTile], y[kTile];
#pragma unroll
            for (int x = 0; x < kTile; ++x) c[x] = kgen::to_float(v_t[column(x)]);
            state.step(k_t, q_t, c, y);
            float divisor = 1.0f;
            if constexpr (kKeySum) {
                const float one[1] = {1.0f};
                float product[1];
                keys.step(k_t, q_t, one, product);
                if constexpr (kNorm) {
                    divisor = kgen::fma(scale, product[0], eps);
                    if (column_block == 0 && threadIdx.x == 0) norm[head * steps + t] = divisor;
                }
            }
#pragma unroll
            for (int x = 0; x < kTile; ++x) {
                if (lane != x % kSplit || !uses(x)) continue;
                float result = y[x] * scale;
                if constexpr (kNorm) result /= divisor;
                results[t * out_stride_T + column(x)] = kgen::from_float<Value>(result);
            }
        });

    // 3. The state after the last step.
    if constexpr (kFinalState) state.store(final_state + state_start, kM, uses, column_offset);
    if constexpr (kFinalKeySum)
        keys.store(final_key_sum + head * kE, 1, only_first, at_start);
}

KGEN_EXPORT(linear_attention_forward);
