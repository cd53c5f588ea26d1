// digest: 826d7be0d371
// Rendered by kgen from templates/linear_attention/backward_block_per_head.cu.jinja
// config: block_per_head(split=16, tile=1, columns=32, tokens=8, stages=1, vec=1)
// problem: E=64, M=64, dtype=fp32, product_dtype=fp32, initial_state_dtype=none, initial_key_sum_dtype=none, final_state_dtype=none, final_key_sum_dtype=none, norm_dtype=none
// linear_attention backward, three walks over time, a block per head, walk and slice of columns: gq
// forward, gk and gv backward in time, each with its state in registers. Nothing is summed across
// blocks, so the result does not depend on timing.
#include "kgen/linear_attention.cuh"

namespace {

using Value = float;
using kgen::i64;
using kgen::Walk;

constexpr int kE = 64;
constexpr int kM = 64;
constexpr int kSplit = 16;      // threads that share a column of a state
constexpr int kTile = 1;        // columns of a thread
constexpr int kColumns = 32;  // columns of a block
constexpr int kTokens = 8;    // steps per barrier
constexpr int kStages = 1;    // batches of steps in shared memory
constexpr int kVec = 1;          // elements per copy

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

// The columns of a thread: neighbouring threads have neighbouring ones, those of one thread lie
// kColumnThreads apart.
struct Slice {
    int first;   // column of the block
    int extent;  // columns of the state

    KGEN_DEVICE int lane() const { return static_cast<int>(threadIdx.x) % kSplit; }
    KGEN_DEVICE int column(int x) const {
        return first + x * kColumnThreads + static_cast<int>(threadIdx.x) / kSplit;
    }
    KGEN_DEVICE bool uses(int x) const { return column(x) < extent; }
};

// One walk over time. With Row, the state has one more row, for the key sum: y_t += by_y(factors) *
// row_t after row_t += by_c(factors) * c_t, in whose place the caller puts what the walk needs.
template <Walk W, int Rows, bool Row, class OfColumn, class OfResult, class OfRow>
KGEN_DEVICE void walk(Slice slice, i64 steps, kgen::Steps<Value> p, kgen::Steps<Value> a,
                      kgen::Steps<Value> c, const kgen::NormGradient& factors,
                      const float* start, i64 row_stride, i64 column_stride, float* end,
                      const float* row_start, float* row_end, Value* results, i64 result_stride,
                      OfColumn of_column, OfResult of_result, OfRow of_row) {
    using State = kgen::StateTile<Rows, kSplit, kTile>;
    using Ring = kgen::StepRing<Value, kThreads, State::kPitch, kColumns, kTokens, kStages, kVec>;
    const auto uses = [&](int x) { return slice.uses(x); };
    const auto place = [&](int x) { return slice.column(x) * column_stride; };

    State state;
    float row[kTile] = {};
    state.load(start, row_stride, uses, place);
    if constexpr (Row) {
#pragma unroll
        for (int x = 0; x < kTile; ++x)
            if (row_start != nullptr && uses(x)) row[x] = row_start[slice.column(x)];
    }
    Ring::template walk<W>(
        steps, Rows, kgen::min(slice.extent - slice.first, kColumns), p, a,
        {c.first + slice.first, c.stride}, factors,
        [&](i64 t, const Value* p_t, const Value* a_t, const Value* c_t, kgen::f32x2 by) {
            float plain[kTile], columns[kTile], y[kTile];
#pragma unroll
            for (int x = 0; x < kTile; ++x) {
                plain[x] = kgen::to_float(c_t[slice.column(x) - slice.first]);
                columns[x] = of_column(plain[x], by);
            }
            state.step(a_t, p_t, columns, y);
#pragma unroll
            for (int x = 0; x < kTile; ++x) {
                y[x] = of_result(y[x], by);
                if constexpr (Row) y[x] += of_row(row[x], plain[x], by);
                if (slice.lane() == x % kSplit && slice.uses(x))
                    results[t * result_stride + slice.column(x)] = kgen::from_float<Value>(y[x]);
            }
        });
    if (end != nullptr) state.store(end, row_stride, uses, place);
    if constexpr (Row) {
#pragma unroll
        for (int x = 0; x < kTile; ++x)
            if (row_end != nullptr && slice.lane() == 0 && uses(x))
                row_end[slice.column(x)] = row[x];
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
    constexpr int kSlices = 2 * kSlicesE + kSlicesM;
    const i64 head = blockIdx.x / kSlices, b = head / H, h = head % H;
    const int item = static_cast<int>(blockIdx.x % kSlices);
    const i64 state_start = head * kE * kM, key_start = head * kE;

    const kgen::Steps<Value> steps_g{gout + b * gout_stride_B + h * gout_stride_H, gout_stride_T};
    const kgen::Steps<Value> steps_q{q + b * q_stride_B + h * q_stride_H, q_stride_T};
    const kgen::Steps<Value> steps_k{k + b * k_stride_B + h * k_stride_H, k_stride_T};
    const kgen::Steps<Value> steps_v{v + b * v_stride_B + h * v_stride_H, v_stride_T};
    const auto factors =
        kgen::norm_gradient(kNorm ? norm : nullptr, gout_dot_out, head * steps, scale);

    const auto plain = [](float value, kgen::f32x2) { return value; };
    const auto scaled = [](float value, kgen::f32x2 by) { return value * by.x; };

    if (item < kSlicesE) {
        // gq_t = S_t g_t + n_t z_t: S transposed, z its one more row.
        const auto row = [](float& z, float key, kgen::f32x2 by) {
            z += key;
            return by.y * z;
        };
        walk<Walk::forward, kM, kNorm>(
            Slice{item * kColumns, kE}, steps, steps_g, steps_v, steps_k, factors,
            kInitialState ? initial_state + state_start : nullptr, 1, kM, nullptr,
            kInitialKeySum ? initial_key_sum + key_start : nullptr, nullptr,
            gq + b * gq_stride_B + h * gq_stride_H, gq_stride_T, plain, scaled, row);
    } else if (item < 2 * kSlicesE) {
        // gk_t = G_t v_t + y_t: G transposed, y its one more row.
        const auto row = [](float& y, float query, kgen::f32x2 by) {
            if constexpr (kNorm) y = kgen::fma(by.y, query, y);
            return y;
        };
        walk<Walk::backward, kM, kNorm || kFinalKeySum || kInitialKeySum>(
            Slice{(item - kSlicesE) * kColumns, kE}, steps, steps_v, steps_g, steps_q, factors,
            kFinalState ? gfinal_state + state_start : nullptr, 1, kM, nullptr,
            kFinalKeySum ? gfinal_key_sum + key_start : nullptr,
            kInitialKeySum ? ginitial_key_sum + key_start : nullptr,
            gk + b * gk_stride_B + h * gk_stride_H, gk_stride_T, scaled, plain, row);
    } else {
        // gv_t = k_t G_t; what is left of G is the gradient of the initial state.
        walk<Walk::backward, kE, false>(
            Slice{(item - 2 * kSlicesE) * kColumns, kM}, steps, steps_k, steps_q, steps_g, factors,
            kFinalState ? gfinal_state + state_start : nullptr, kM, 1,
            kInitialState ? ginitial_state + state_start : nullptr, nullptr, nullptr,
            gv + b * gv_stride_B + h * gv_stride_H, gv_stride_T, scaled, plain,
            [](float&, float, kgen::f32x2) { return 0.0f; });
    }
}

KGEN_EXPORT(linear_attention_backward);
