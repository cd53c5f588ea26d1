// digest: 73c2019019a3
// Rendered by kgen from templates/wkv/backward_naive.cu.jinja
// config: naive(threads=64, chunk=64)
// problem: dtype=bf16, w_dtype=bf16, u_dtype=fp32, decay_form=log
// wkv5 and wkv6 backward, one thread per column of the state, the states in global memory. Any shape.
// All sums are in a fixed order.
//
//     wkv_backward_v       gv and the gradient of the initial state
//     wkv_backward_rkw     gr, gk, gw, and parts of gu
//     wkv_backward_reduce  gu, and wkv5's gw
#include "kgen/wkv/naive.cuh"
#include "kgen/wkv/reduce.cuh"

namespace {

using Value = kgen::bf16;
using W = kgen::bf16;
using U = float;
using kgen::i64;
using kgen::wkv::Rows;

constexpr kgen::DecayForm kForm = kgen::DecayForm::log;  // of w
constexpr int kThreads = 64;
constexpr int kChunk = 64;  // steps between two checkpoints of the state
constexpr int kRows = 8;          // features that are loaded before the first of them is stored, as in `run_in_memory`

// One thread computes gv of a value feature of a head, backward in time.
KGEN_DEVICE void backward_v(i64 N, i64 T, i64 H, i64 K, i64 V, const void* cu_seqlens,
                            i64 cu_seqlens_itemsize, Rows<const Value> gy, Rows<const Value> r,
                            Rows<const Value> k, Rows<const W> w, const U* u,
                            const float* gfinal_state, Rows<Value> gv, float* ginitial_state,
                            float* states, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [N, H, V]
    if (column >= N * H * V) return;
    const i64 head = column / V, m = column % V, h = head % H;
    const auto span = kgen::wkv::span_of(cu_seqlens, cu_seqlens_itemsize, head / H, T);
    const i64 first = head * K * V + m;  // of the column, in a state
    float* gradient = states + first;    // of the state

    // 1. The gradient after the last step.
    for (i64 i = 0; i < K; ++i)
        gradient[i * V] = gfinal_state ? gfinal_state[first + i * V] : 0.0f;

    // 2. Step by step, backward in time.
    const auto gy_h = gy.head(span, h);
    const auto r_h = r.head(span, h);
    const auto k_h = k.head(span, h);
    const auto gv_h = gv.head(span, h);
    kgen::run_in_memory<kgen::Direction::backward>(
        gradient, V, K, span.steps, k_h.first, k_h.stride_t, r_h.first, r_h.stride_t,
        [&](i64 t) { return scale * gy_h(t, m); },
        [&](i64 t, float read) {
            const float bonus = kgen::wkv::bonus_of(r_h.at(t), u + h * K, k_h.at(t), K);
            gv_h.at(t)[m] = kgen::from_float<Value>(kgen::fma(bonus, scale * gy_h(t, m), read));
        },
        kgen::wkv::RowDecay<kForm, W>{w.head(span, h)});

    // 3. The gradient of the initial state.
    if (ginitial_state)
        for (i64 i = 0; i < K; ++i) ginitial_state[first + i * V] = gradient[i * V];
}

// `Count` features of a key's state after a step; `pitch` floats from feature to feature.
template <int Count>
KGEN_DEVICE void next_state(const float* now, float* after, i64 pitch, float decay, float k, const Value* v) {
    float s[Count];
#pragma unroll
    for (int j = 0; j < Count; ++j) s[j] = kgen::fma(decay, now[j * pitch], k * kgen::to_float(v[j]));
#pragma unroll
    for (int j = 0; j < Count; ++j) after[j * pitch] = s[j];
}

// Sums of a step over the value features of a key.
struct StepSums {
    float read = 0.0f;     // gradient of the state, times v
    float inner = 0.0f;    // gradient of the state, times the state before the step
    float product = 0.0f;  // v times gy
};

// Adds `Count` features to a step's sums, and takes the gradient of the state back over the step.
template <int Count>
KGEN_DEVICE void gradient_rows(float* gradient, const float* before, i64 pitch, float decay, float query,
                               float scale, const Value* gy, const Value* v, StepSums& sums) {
    float s[Count], of_state[Count], g[Count], value[Count];
#pragma unroll
    for (int j = 0; j < Count; ++j) {
        s[j] = gradient[j * pitch];
        of_state[j] = before[j * pitch];
        g[j] = scale * kgen::to_float(gy[j]);
        value[j] = kgen::to_float(v[j]);
    }
#pragma unroll
    for (int j = 0; j < Count; ++j) {
        sums.read = kgen::fma(s[j], value[j], sums.read);
        sums.inner = kgen::fma(of_state[j], s[j], sums.inner);
        sums.product = kgen::fma(value[j], g[j], sums.product);
        gradient[j * pitch] = kgen::fma(decay, s[j], query * g[j]);
    }
}

// One thread computes gr, gk, gw and a part of gu of a key of a head. put_w(span, t, h, key, gw) receives gw_t.
template <class PutW>
KGEN_DEVICE void backward_rkw(i64 N, i64 T, i64 H, i64 K, i64 V, const void* cu_seqlens,
                              i64 cu_seqlens_itemsize, Rows<const Value> gy, Rows<const Value> r,
                              Rows<const Value> k, Rows<const Value> v, Rows<const W> w,
                              const U* u, const float* initial_state, const float* gfinal_state,
                              Rows<Value> gr, Rows<Value> gk, float* gu_parts, float* states,
                              float* gradients, float* checkpoint_states, float* chunk_states,
                              float scale, PutW put_w) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [N, H, K]
    if (column >= N * H * K) return;
    const i64 head = column / K, key = column % K, h = head % H;
    const auto span = kgen::wkv::span_of(cu_seqlens, cu_seqlens_itemsize, head / H, T);
    const i64 size = K * V, chunks = kgen::ceil_div(span.steps, static_cast<i64>(kChunk));
    // Packed sequences begin at any step, so that each sequence before this one may have a partial chunk: one chunk
    // more per sequence is reserved.
    const i64 chunks_before = cu_seqlens_itemsize == 0
                                  ? head * chunks
                                  : h * (T / kChunk + N) + span.first / kChunk + head / H;
    float* state = states + head * size + key;
    float* gradient = gradients + head * size + key;  // of the state
    float* checkpoints = checkpoint_states + chunks_before * size + key;
    float* before = chunk_states + head * kChunk * size + key;  // each step of a chunk
    const float bonus = kgen::to_float(u[h * K + key]);
    const auto gy_h = gy.head(span, h);
    const auto r_h = r.head(span, h);
    const auto k_h = k.head(span, h);
    const auto v_h = v.head(span, h);
    const auto w_h = w.head(span, h);
    const auto gr_h = gr.head(span, h);
    const auto gk_h = gk.head(span, h);

    // 1. Forward in time: gr, and the state before each chunk.
    for (i64 i = 0; i < V; ++i)
        state[i * K] = initial_state ? initial_state[(head * K + key) * V + i] : 0.0f;
    kgen::run_in_memory<kgen::Direction::forward>(
        state, K, V, span.steps, gy_h.first, gy_h.stride_t, v_h.first, v_h.stride_t,
        [&](i64 t) {
            if (t % kChunk == 0)
                for (i64 i = 0; i < V; ++i)
                    checkpoints[t / kChunk * size + i * K] = state[i * K];
            return k_h(t, key);
        },
        [&](i64 t, float read) {
            const float product = kgen::wkv::dot(v_h.at(t), gy_h.at(t), V);
            gr_h.at(t)[key] = kgen::from_float<Value>(
                scale * kgen::fma(product, bonus * k_h(t, key), read));
        },
        kgen::wkv::ColumnDecay<kForm, W>{w_h, key});

    // 2. Backward in time, chunk by chunk.
    for (i64 i = 0; i < V; ++i)
        gradient[i * K] = gfinal_state ? gfinal_state[(head * K + key) * V + i] : 0.0f;
    kgen::CompensatedSum gu;
    for (i64 c = chunks - 1; c >= 0; --c) {
        const i64 begin = c * kChunk, end = kgen::min(begin + kChunk, span.steps);
        // 2a. The states before each of the chunk's steps, from its checkpoint.
        for (i64 i = 0; i < V; ++i) before[i * K] = checkpoints[c * size + i * K];
        for (i64 t = begin; t + 1 < end; ++t) {
            const float decay = kgen::decay_of<kForm>(w_h(t, key)), k_t = k_h(t, key);
            const float* now = before + (t - begin) * size;
            float* after = before + (t + 1 - begin) * size;
            i64 i = 0;
            for (; i + kRows <= V; i += kRows)
                next_state<kRows>(now + i * K, after + i * K, K, decay, k_t, v_h.at(t) + i);
            for (; i < V; ++i) next_state<1>(now + i * K, after + i * K, K, decay, k_t, v_h.at(t) + i);
        }
        // 2b. The gradients of the steps, last step first.
        for (i64 t = end - 1; t >= begin; --t) {
            const float w_t = w_h(t, key), decay = kgen::decay_of<kForm>(w_t), query = r_h(t, key);
            const float* now = before + (t - begin) * size;
            StepSums sums;
            i64 i = 0;
            for (; i + kRows <= V; i += kRows)
                gradient_rows<kRows>(gradient + i * K, now + i * K, K, decay, query, scale, gy_h.at(t) + i,
                                     v_h.at(t) + i, sums);
            for (; i < V; ++i)
                gradient_rows<1>(gradient + i * K, now + i * K, K, decay, query, scale, gy_h.at(t) + i,
                                 v_h.at(t) + i, sums);
            gk_h.at(t)[key] = kgen::from_float<Value>(kgen::fma(sums.product, bonus * query, sums.read));
            put_w(span, t, h, key, kgen::decay_slope<kForm>(w_t, decay) * sums.inner);
            gu.add(sums.product * query * k_h(t, key));
        }
    }
    gu_parts[column] = gu.value();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_backward_v(const Value* __restrict__ gy,            // [B, T, H, V]
               const Value* __restrict__ r,             // [B, T, H, K]
               const Value* __restrict__ k,             // [B, T, H, K]
               const W* __restrict__ w,                 // [B, T, H, K], or [H, K]
               const U* __restrict__ u,                 // [H, K]
               const float* __restrict__ gfinal_state,  // [N, H, K, V] or null
               const void* __restrict__ cu_seqlens,     // [N + 1] or null
               Value* __restrict__ gv,                  // [B, T, H, V]
               float* __restrict__ ginitial_state,      // [N, H, K, V] or null
               float* __restrict__ states,              // [N, H, K, V]
               i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 gy_stride_B,
               i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H,
               i64 k_stride_B, i64 k_stride_T, i64 k_stride_H,
               i64 gv_stride_B, i64 gv_stride_T, i64 gv_stride_H, float scale) {
    backward_v(
        N, T, H, K, V, cu_seqlens, cu_seqlens_itemsize,
        {gy, gy_stride_B, gy_stride_T, gy_stride_H}, {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H},
        kgen::wkv::same_at_every_step(w, K),
        u, gfinal_state, {gv, gv_stride_B, gv_stride_T, gv_stride_H}, ginitial_state, states,
        scale);
}

KGEN_EXPORT(wkv_backward_v);

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_backward_rkw(const Value* __restrict__ gy,             // [B, T, H, V]
                 const Value* __restrict__ r,              // [B, T, H, K]
                 const Value* __restrict__ k,              // [B, T, H, K]
                 const Value* __restrict__ v,              // [B, T, H, V]
                 const W* __restrict__ w,                  // [B, T, H, K], or [H, K]
                 const U* __restrict__ u,                  // [H, K]
                 const float* __restrict__ initial_state,  // [N, H, K, V] or null
                 const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                 const void* __restrict__ cu_seqlens,      // [N + 1] or null
                 Value* __restrict__ gr,                   // [B, T, H, K]
                 Value* __restrict__ gk,                   // [B, T, H, K]
                 float* __restrict__ gw_parts,             // [N, H, K]
                 float* __restrict__ gu_parts,             // [N, H, K]
                 float* __restrict__ states,               // [N, H, V, K]
                 float* __restrict__ gradients,            // [N, H, V, K]
                 float* __restrict__ checkpoint_states,    // [B, H, chunks, V, K]; packed
                                                           // [H, T / kChunk + N, V, K]
                 float* __restrict__ chunk_states,         // [N, H, kChunk, V, K]
                 i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 gy_stride_B,
                 i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B, i64 r_stride_T, i64 r_stride_H,
                 i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T,
                 i64 v_stride_H,
                 i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H, i64 gk_stride_B,
                 i64 gk_stride_T, i64 gk_stride_H,
                 float scale) {
    kgen::CompensatedSum gw;  // of the thread's key
    backward_rkw(
        N, T, H, K, V, cu_seqlens, cu_seqlens_itemsize,
        {gy, gy_stride_B, gy_stride_T, gy_stride_H}, {r, r_stride_B, r_stride_T, r_stride_H},
        {k, k_stride_B, k_stride_T, k_stride_H}, {v, v_stride_B, v_stride_T, v_stride_H},
        kgen::wkv::same_at_every_step(w, K),
        u, initial_state, gfinal_state, {gr, gr_stride_B, gr_stride_T, gr_stride_H},
        {gk, gk_stride_B, gk_stride_T, gk_stride_H}, gu_parts, states, gradients,
        checkpoint_states, chunk_states, scale,
        [&](const kgen::wkv::Span&, i64, i64, i64, float x) { gw.add(x); });
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    if (column < N * H * K) gw_parts[column] = gw.value();
}

KGEN_EXPORT(wkv_backward_rkw);

extern "C" __global__ void __launch_bounds__(kThreads)
wkv_backward_reduce(
                    const float* __restrict__ gw_parts,  // [N, H, K]
                    const float* __restrict__ gu_parts,  // [N, H, K]
                    W* __restrict__ gw,                  // [H, K]
                    U* __restrict__ gu,                  // [H, K]
                    i64 N, i64 H, i64 K) {
    kgen::wkv::sum_sequences<kThreads>(gw_parts, N, H * K, gw);
    kgen::wkv::sum_sequences<kThreads>(gu_parts, N, H * K, gu);
}

KGEN_EXPORT(wkv_backward_reduce);
