// Rendered by kgen from templates/linear_attention/backward_block_per_head.cu.jinja
// config: block_per_head(split=4, tile=4, columns=32, tokens=8, stages=3, vec=4)
// problem: E=64, M=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, block_per_head: three loops over time with the state in registers, gq forward, gk and gv
// backward in time. A CTA has one head, one of the three gradients and one block of columns. No sum goes across CTAs,
// so the result is deterministic.
#include "kgen/linear_attention/norm_gradient.cuh"

namespace {

using Value = float;
using kgen::i64;
using kgen::Direction;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kSplit = 4;      // threads that share a column of a state
constexpr int kTile = 4;        // columns of a thread
constexpr int kColumns = 32;  // columns of a CTA
constexpr int kTokens = 8;    // steps per barrier
constexpr int kStages = 3;    // batches of kTokens steps in shared memory
constexpr int kVec = 4;          // elements per copy

constexpr bool kInitialState = kgen::kPresent<kgen::none>;
constexpr bool kInitialKeySum = kgen::kPresent<kgen::none>;
constexpr bool kFinalState = kgen::kPresent<kgen::none>;
constexpr bool kFinalKeySum = kgen::kPresent<kgen::none>;
constexpr bool kNorm = kgen::kPresent<kgen::none>;

constexpr int kColumnThreads = kColumns / kTile;
constexpr int kThreads = kColumnThreads * kSplit;
constexpr int kSlicesE = kgen::ceil_div(kE, kColumns);
constexpr int kSlicesM = kgen::ceil_div(kM, kColumns);

static_assert(kThreads % 32 == 0 && kThreads <= 1024, "whole warps, at most 1024 threads");
static_assert(kE % kVec == 0 && kM % kVec == 0, "a copy must not cross the end of a row");

// The columns of a thread. Adjacent threads have adjacent columns; the columns of one thread are kColumnThreads apart.
struct Columns {
    int first;   // column of the CTA
    int extent;  // columns of the state

    KGEN_DEVICE int lane() const { return static_cast<int>(threadIdx.x) % kSplit; }
    KGEN_DEVICE int column(int x) const {
        return first + x * kColumnThreads + static_cast<int>(threadIdx.x) / kSplit;
    }
    KGEN_DEVICE bool uses(int x) const { return column(x) < extent; }
};

// One loop over time: S_t = S_{t-1} + a_t of_column(c_t), result_t = of_result(p_t S_t). With Row the state has one
// more row, for the key sum: of_row updates it and returns what it adds to the result.
template <Direction W, int Rows, bool Row, class OfColumn, class OfResult, class OfRow>
KGEN_DEVICE void loop_over_time(Columns mine, i64 steps, kgen::StepPointer<Value> p, kgen::StepPointer<Value> a,
                      kgen::StepPointer<Value> c, const kgen::NormGradient& factors,
                      const float* start, i64 row_stride, i64 column_stride, float* end,
                      const float* row_start, float* row_end, Value* results, i64 result_stride,
                      OfColumn of_column, OfResult of_result, OfRow of_row) {
    using State = kgen::ThreadStateTile<Rows, kSplit, kTile>;
    using Ring = kgen::StepRing<Value, kThreads, State::kPitch, kColumns, kTokens, kStages, kVec>;
    const auto uses = [&](int x) { return mine.uses(x); };
    const auto feature_offset = [&](int x) { return mine.column(x) * column_stride; };

    State state;
    float row[kTile] = {};
    state.load(start, row_stride, uses, feature_offset);
    if constexpr (Row) {
#pragma unroll
        for (int x = 0; x < kTile; ++x)
            if (row_start != nullptr && uses(x)) row[x] = row_start[mine.column(x)];
    }
    Ring::template run<W>(
        steps, Rows, kgen::min(mine.extent - mine.first, kColumns), p, a,
        {c.first + mine.first, c.stride}, factors,
        [&](i64 t, const Value* p_t, const Value* a_t, const Value* c_t, kgen::f32x2 by) {
            float plain[kTile], columns[kTile], y[kTile];
#pragma unroll
            for (int x = 0; x < kTile; ++x) {
                plain[x] = kgen::to_float(c_t[mine.column(x) - mine.first]);
                columns[x] = of_column(plain[x], by);
            }
            state.step(a_t, p_t, columns, y);
#pragma unroll
            for (int x = 0; x < kTile; ++x) {
                y[x] = of_result(y[x], by);
                if constexpr (Row) y[x] += of_row(row[x], plain[x], by);
                if (mine.lane() == x % kSplit && mine.uses(x))
                    results[t * result_stride + mine.column(x)] = kgen::from_float<Value>(y[x]);
            }
        });
    if (end != nullptr) state.store(end, row_stride, uses, feature_offset);
    if constexpr (Row) {
#pragma unroll
        for (int x = 0; x < kTile; ++x)
            if (row_end != nullptr && mine.lane() == 0 && uses(x))
                row_end[mine.column(x)] = row[x];
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
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
                          i64 H, i64 steps, i64 gout_stride_B, i64 gout_stride_H,
                          i64 gout_stride_T, i64 q_stride_B, i64 q_stride_H, i64 q_stride_T,
                          i64 k_stride_B, i64 k_stride_H, i64 k_stride_T, i64 v_stride_B,
                          i64 v_stride_H, i64 v_stride_T, i64 gq_stride_B, i64 gq_stride_H,
                          i64 gq_stride_T, i64 gk_stride_B, i64 gk_stride_H, i64 gk_stride_T,
                          i64 gv_stride_B, i64 gv_stride_H, i64 gv_stride_T, float scale) {
    constexpr int kValueBlocks = 2 * kSlicesE + kSlicesM;
    const i64 head = blockIdx.x / kValueBlocks, b = head / H, h = head % H;
    const int item = static_cast<int>(blockIdx.x % kValueBlocks);
    const i64 state_start = head * kE * kM, key_start = head * kE;

    const kgen::StepPointer<Value> steps_g{gout + b * gout_stride_B + h * gout_stride_H, gout_stride_T};
    const kgen::StepPointer<Value> steps_q{q + b * q_stride_B + h * q_stride_H, q_stride_T};
    const kgen::StepPointer<Value> steps_k{k + b * k_stride_B + h * k_stride_H, k_stride_T};
    const kgen::StepPointer<Value> steps_v{v + b * v_stride_B + h * v_stride_H, v_stride_T};
    const auto factors =
        kgen::norm_gradient(kNorm ? norm : nullptr, gout_dot_out, head * steps, scale);

    const auto plain = [](float value, kgen::f32x2) { return value; };
    const auto scaled = [](float value, kgen::f32x2 by) { return value * by.x; };

    if (item < kSlicesE) {
        // gq_t = S_t g_t + n_t z_t, with S transposed; z is its additional row.
        const auto row = [](float& z, float key, kgen::f32x2 by) {
            z += key;
            return by.y * z;
        };
        loop_over_time<Direction::forward, kM, kNorm>(
            Columns{item * kColumns, kE}, steps, steps_g, steps_v, steps_k, factors,
            kInitialState ? initial_state + state_start : nullptr, 1, kM, nullptr,
            kInitialKeySum ? initial_key_sum + key_start : nullptr, nullptr,
            gq + b * gq_stride_B + h * gq_stride_H, gq_stride_T, plain, scaled, row);
    } else if (item < 2 * kSlicesE) {
        // gk_t = G_t v_t + y_t, with G transposed; y is its additional row.
        const auto row = [](float& y, float query, kgen::f32x2 by) {
            if constexpr (kNorm) y = kgen::fma(by.y, query, y);
            return y;
        };
        loop_over_time<Direction::backward, kM, kNorm || kFinalKeySum || kInitialKeySum>(
            Columns{(item - kSlicesE) * kColumns, kE}, steps, steps_v, steps_g, steps_q, factors,
            kFinalState ? gfinal_state + state_start : nullptr, 1, kM, nullptr,
            kFinalKeySum ? gfinal_key_sum + key_start : nullptr,
            kInitialKeySum ? ginitial_key_sum + key_start : nullptr,
            gk + b * gk_stride_B + h * gk_stride_H, gk_stride_T, scaled, plain, row);
    } else {
        // gv_t = k_t G_t; G after the loop is the gradient of the initial state.
        loop_over_time<Direction::backward, kE, false>(
            Columns{(item - 2 * kSlicesE) * kColumns, kM}, steps, steps_k, steps_q, steps_g, factors,
            kFinalState ? gfinal_state + state_start : nullptr, kM, 1,
            kInitialState ? ginitial_state + state_start : nullptr, nullptr, nullptr,
            gv + b * gv_stride_B + h * gv_stride_H, gv_stride_T, scaled, plain,
            [](float&, float, kgen::f32x2) { return 0.0f; });
    }
}

KGEN_EXPORT(linear_attention_backward);
