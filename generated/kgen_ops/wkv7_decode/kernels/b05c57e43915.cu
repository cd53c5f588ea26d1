// digest: b05c57e43915
// Rendered by kgen from templates/wkv7_decode/forward_warp_state.cu.jinja
// config: warp_state(threads=256, split=8, tile=4, run=2, order=values)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, state_indices_dtype=none, decay_form=clamp
// wkv7, a few steps of decoding: a warp holds columns of a sequence's state in registers and updates the pool in place.
#include "kgen/wkv/warp_state.cuh"
#include "kgen/wkv7/decay.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using Index = kgen::none;  // none: sequence n has slot n
using kgen::i64;
using kgen::wkv7::Rows;

constexpr auto kForm = kgen::wkv7::DecayForm::clamp;  // of w
constexpr int kK = 64, kV = 64;
constexpr int kThreads = 256;
using State = kgen::wkv::WarpState<kK, kV, 8, 4, 2,
                                   kgen::wkv::StateOrder::values>;

constexpr int kBlocksV = kgen::ceil_div(kV, State::kColumns);  // warps per head

// The tensors of a head.
struct Inputs {
    Rows<const Value> r, k, v, a, b;
    Rows<const W> w;
};

// The rows of a step.
struct Step {
    State::Keys r, w, k, a, b;
    float v[State::kTile];
};

KGEN_DEVICE Step step_of(const State& state, const Inputs& of, i64 t) {
    Step step{State::keys_of(of.r.at(t)), State::keys_of(of.w.at(t)), State::keys_of(of.k.at(t)),
              State::keys_of(of.a.at(t)), State::keys_of(of.b.at(t)), {}};
    state.values_of(of.v.at(t), step.v);
    return step;
}

// Computes S = D S + b (a S)^T + k v^T, then y. Rows that do not exist are set to 0: with an Inf in v or sa they would
// become NaN.
KGEN_DEVICE void advance(State& state, const Step& step, float scale, float (&y)[State::kTile]) {
    float sa[State::kTile];
    state.read(step.a, sa);
#pragma unroll
    for (int i = 0; i < State::kRuns; ++i)
#pragma unroll
        for (int j = 0; j < State::kRun; ++j) {
            const float decay = kgen::wkv7::decay_of<kForm>(step.w.at[i][j]);
            const float b = step.b.at[i][j], k = step.k.at[i][j];
#pragma unroll
            for (int x = 0; x < State::kTile; ++x) {
                float& s = state.at[i][j][x];
                s = State::has_run(i) ? kgen::fma(decay, s, kgen::fma(b, sa[x], k * step.v[x]))
                                      : 0.0f;
            }
        }
    state.read(step.r, y);
#pragma unroll
    for (int x = 0; x < State::kTile; ++x) y[x] *= scale;
}

}  // namespace

// With a minimum of one block per SM ptxas keeps all values of a warp in registers. Without the minimum it aims at more
// warps and may spill a few bytes.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
wkv7_decode(const Value* __restrict__ r,              // [B, T, H, K]
            const W* __restrict__ w,                  // [B, T, H, K]
            const Value* __restrict__ k,              // [B, T, H, K]
            const Value* __restrict__ v,              // [B, T, H, V]
            const Value* __restrict__ a,              // [B, T, H, K]
            const Value* __restrict__ b,              // [B, T, H, K]
            float* __restrict__ state_pool,           // [S, H, K, V], updated
            const Index* __restrict__ state_indices,  // [B] or null
            Value* __restrict__ y,                    // [B, T, H, V]
            i64 B, i64 S, i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H,
            i64 w_stride_B, i64 w_stride_T, i64 w_stride_H, i64 k_stride_B, i64 k_stride_T,
            i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H, i64 a_stride_B,
            i64 a_stride_T, i64 a_stride_H, i64 b_stride_B, i64 b_stride_T, i64 b_stride_H,
            i64 state_pool_stride_S, i64 state_pool_stride_H, i64 state_pool_stride_K,
            i64 state_pool_stride_V, i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    const i64 warp = static_cast<i64>(blockIdx.x) * (kThreads / kgen::kWarpSize) +
                     threadIdx.x / kgen::kWarpSize;
    const i64 n = warp / kBlocksV / H, h = warp / kBlocksV % H;
    if (n >= B) return;
    State state;
    state.first_column = static_cast<int>(warp % kBlocksV) * State::kColumns;
    const auto y_h = Rows<Value>{y, y_stride_B, y_stride_T, y_stride_H}.head(n, h);

    // 1. The slot.
    const auto slot = kgen::wkv::slot_of(state_indices, n, S);
    if (!slot.used) {
        float values[State::kTile];
#pragma unroll
        for (int x = 0; x < State::kTile; ++x) values[x] = slot.y;
        for (i64 t = 0; t < T; ++t) state.write(y_h.at(t), values);
        return;
    }
    if (T == 0) return;

    // 2. The state, and the rows of the first step.
    const Inputs of{Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}.head(n, h),
                    Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}.head(n, h),
                    Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}.head(n, h),
                    Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}.head(n, h),
                    Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}.head(n, h),
                    Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}.head(n, h)};
    const kgen::wkv::StatePool pool{state_pool, state_pool_stride_S, state_pool_stride_H,
                                    state_pool_stride_K, state_pool_stride_V};
    const auto states = pool.head(slot.place, h);
    state.load(states);
    Step step = step_of(state, of, 0);

    // 3. Step by step: the new state, then the output.
    for (i64 t = 0; t < T; ++t) {
        float values[State::kTile];
        advance(state, step, scale, values);
        if (t + 1 < T) step = step_of(state, of, t + 1);
        state.write(y_h.at(t), values);
    }

    // 4. The state after the last step.
    state.store(states);
}

KGEN_EXPORT(wkv7_decode);
