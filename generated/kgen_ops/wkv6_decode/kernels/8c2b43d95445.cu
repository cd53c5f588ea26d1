// digest: 8c2b43d95445
// Rendered by kgen from templates/wkv_decode/forward_warp_state.cu.jinja
// config: warp_state(threads=256, split=8, tile=4, run=1, order=values)
// problem: K=64, V=64, dtype=bf16, w_dtype=fp32, u_dtype=bf16, state_indices_dtype=int64, decay_form=log
// wkv5 and wkv6, a few steps of decoding: a warp holds columns of a sequence's state in registers and updates the pool
// in place.
#include "kgen/wkv/naive.cuh"
#include "kgen/wkv/warp_state.cuh"

namespace {

using Value = kgen::bf16;
using W = float;
using U = kgen::bf16;
using Index = kgen::i64;  // none: sequence n has slot n
using kgen::i64;
using kgen::wkv::Rows;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kK = 64, kV = 64;
constexpr int kThreads = 256;
using State = kgen::wkv::WarpState<kK, kV, 8, 4, 1,
                                   kgen::wkv::StateOrder::values>;

constexpr int kBlocksV = kgen::ceil_div(kV, State::kColumns);  // warps per head

// The rows of a step.
struct Step {
    State::Keys r, k, w;
    float v[State::kTile];
};

KGEN_DEVICE Step step_of(const State& state, const Rows<const Value>& r, const Rows<const Value>& k,
                         const Rows<const Value>& v, const Rows<const W>& w, i64 t) {
    Step step{State::keys_of(r.at(t)), State::keys_of(k.at(t)), State::keys_of(w.at(t)), {}};
    state.values_of(v.at(t), step.v);
    return step;
}

// Computes y, then S = D S + k v^T. Rows that do not exist are set to 0: with an Inf in v they would become NaN.
KGEN_DEVICE void advance(State& state, const Step& step, const State::Keys& u, float scale,
                         float (&y)[State::kTile]) {
    state.read(step.r, y);
    float bonus = 0.0f;
#pragma unroll
    for (int i = 0; i < State::kRuns; ++i)
#pragma unroll
        for (int j = 0; j < State::kRun; ++j)
            bonus = kgen::fma(step.r.at[i][j] * u.at[i][j], step.k.at[i][j], bonus);
    bonus = State::sum_of_parts(bonus);
#pragma unroll
    for (int x = 0; x < State::kTile; ++x) y[x] = scale * kgen::fma(bonus, step.v[x], y[x]);
#pragma unroll
    for (int i = 0; i < State::kRuns; ++i)
#pragma unroll
        for (int j = 0; j < State::kRun; ++j) {
            const float decay = kgen::decay_of<kForm>(step.w.at[i][j]);
#pragma unroll
            for (int x = 0; x < State::kTile; ++x) {
                float& s = state.at[i][j][x];
                s = State::has_run(i) ? kgen::fma(decay, s, step.k.at[i][j] * step.v[x]) : 0.0f;
            }
        }
}

// One warp computes all steps of a sequence's head, for some columns of the state.
KGEN_DEVICE void decode(i64 B, i64 S, i64 T, i64 H, const Rows<const Value>& r,
                        const Rows<const Value>& k, const Rows<const Value>& v,
                        const Rows<const W>& w, const U* u, const kgen::wkv::StatePool& pool,
                        const Index* indices, const Rows<Value>& y, float scale) {
    const i64 warp = static_cast<i64>(blockIdx.x) * (kThreads / kgen::kWarpSize) +
                     threadIdx.x / kgen::kWarpSize;
    const i64 n = warp / kBlocksV / H, h = warp / kBlocksV % H;
    if (n >= B) return;
    State state;
    state.first_column = static_cast<int>(warp % kBlocksV) * State::kColumns;
    const auto y_h = y.head(n, h);

    // 1. The slot.
    const auto slot = kgen::wkv::slot_of(indices, n, S);
    if (!slot.used) {
        float values[State::kTile];
#pragma unroll
        for (int x = 0; x < State::kTile; ++x) values[x] = slot.y;
        for (i64 t = 0; t < T; ++t) state.write(y_h.at(t), values);
        return;
    }
    if (T == 0) return;

    // 2. The state, and the rows of the first step.
    const auto states = pool.head(slot.place, h);
    state.load(states);
    const auto u_h = State::keys_of(u + h * kK);
    const auto r_h = r.head(n, h), k_h = k.head(n, h), v_h = v.head(n, h);
    const auto w_h = w.head(n, h);
    Step step = step_of(state, r_h, k_h, v_h, w_h, 0);

    // 3. Step by step: the output, then the new state.
    for (i64 t = 0; t < T; ++t) {
        float values[State::kTile];
        advance(state, step, u_h, scale, values);
        if (t + 1 < T) step = step_of(state, r_h, k_h, v_h, w_h, t + 1);
        state.write(y_h.at(t), values);
    }

    // 4. The state after the last step.
    state.store(states);
}

}  // namespace

// With a minimum of one block per SM ptxas keeps all values of a warp in registers. Without the minimum it aims at more
// warps and may spill a few bytes.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
wkv_decode(const Value* __restrict__ r,              // [B, T, H, K]
           const Value* __restrict__ k,              // [B, T, H, K]
           const Value* __restrict__ v,              // [B, T, H, V]
           const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
           const U* __restrict__ u,                  // [H, K]
           float* __restrict__ state_pool,           // [S, H, K, V], updated
           const Index* __restrict__ state_indices,  // [B] or null
           Value* __restrict__ y,                    // [B, T, H, V]
           i64 B, i64 S, i64 T, i64 H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H,
           i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
           i64 v_stride_H,
           i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
           i64 state_pool_stride_S, i64 state_pool_stride_H, i64 state_pool_stride_K,
           i64 state_pool_stride_V, i64 y_stride_B, i64 y_stride_T, i64 y_stride_H, float scale) {
    decode(B, S, T, H, {r, r_stride_B, r_stride_T, r_stride_H},
           {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
           {w, w_stride_B, w_stride_T, w_stride_H},
           u,
           {state_pool, state_pool_stride_S, state_pool_stride_H, state_pool_stride_K,
            state_pool_stride_V},
           state_indices, {y, y_stride_B, y_stride_T, y_stride_H}, scale);
}

KGEN_EXPORT(wkv_decode);
