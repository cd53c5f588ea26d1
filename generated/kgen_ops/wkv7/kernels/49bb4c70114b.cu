// digest: 49bb4c70114b
// Rendered by kgen from templates/wkv7/backward_naive.cu.jinja
// config: naive(threads=64, chunk=64)
// problem: dtype=fp16, w_dtype=fp32, decay_form=clamp
// wkv7 backward, one thread per column or row of the state, the states in global memory. Any shape. All sums are in a
// fixed order.
//
//     wkv7_backward_columns  sa, forward in time; gsa, gv and the gradient of the initial state, backward in time
//     wkv7_backward_rows     with these gr, gw, gk, ga and gb, from checkpoint to checkpoint of the state
#include "kgen/wkv7/checkpoints.cuh"
#include "kgen/wkv7/naive.cuh"

namespace {

using Value = kgen::fp16;
using W = float;
using kgen::from_float;
using kgen::i64;
using kgen::wkv7::Rows;

constexpr auto kForm = kgen::wkv7::DecayForm::clamp;  // of w
constexpr int kThreads = 64;
constexpr int kChunk = 64;  // steps between two checkpoints of the state

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
wkv7_backward_columns(const Value* __restrict__ gy,             // [B, T, H, V]
                      const Value* __restrict__ r,              // [B, T, H, K]
                      const W* __restrict__ w,                  // [B, T, H, K]
                      const Value* __restrict__ k,              // [B, T, H, K]
                      const Value* __restrict__ v,              // [B, T, H, V]
                      const Value* __restrict__ a,              // [B, T, H, K]
                      const Value* __restrict__ b,              // [B, T, H, K]
                      const float* __restrict__ initial_state,  // [N, H, K, V] or null
                      const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                      const void* __restrict__ cu_seqlens,      // [N + 1] or null
                      Value* __restrict__ gv,                   // [B, T, H, V]
                      float* __restrict__ ginitial_state,       // [N, H, K, V] or null
                      float* __restrict__ sa,                   // [B, T, H, V]
                      float* __restrict__ gsa,                  // [B, T, H, V]
                      float* __restrict__ states,               // [N, H, K, V]
                      i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 gy_stride_B,
                      i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B, i64 r_stride_T,
                      i64 r_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H,
                      i64 k_stride_B, i64 k_stride_T, i64 k_stride_H, i64 v_stride_B,
                      i64 v_stride_T, i64 v_stride_H, i64 a_stride_B, i64 a_stride_T,
                      i64 a_stride_H, i64 b_stride_B, i64 b_stride_T, i64 b_stride_H,
                      i64 gv_stride_B, i64 gv_stride_T, i64 gv_stride_H, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [N, H, V]
    if (column >= N * H * V) return;
    const i64 head = column / V, m = column % V, h = head % H, first = head * K * V + m;
    const auto span = kgen::wkv::span_of(cu_seqlens, cu_seqlens_itemsize, head / H, T);
    const auto gy_h = Rows<const Value>{gy, gy_stride_B, gy_stride_T, gy_stride_H}.head(span, h);
    const auto r_h = Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}.head(span, h);
    const auto w_h = Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}.head(span, h);
    const auto k_h = Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}.head(span, h);
    const auto v_h = Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}.head(span, h);
    const auto a_h = Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}.head(span, h);
    const auto b_h = Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}.head(span, h);
    const auto gv_h = Rows<Value>{gv, gv_stride_B, gv_stride_T, gv_stride_H}.head(span, h);
    const auto sa_h = kgen::wkv7::dense_rows(sa, T, H, V).head(span, h);
    const auto gsa_h = kgen::wkv7::dense_rows(gsa, T, H, V).head(span, h);

    // 1. Forward in time: sa.
    const kgen::wkv7::ColumnInMemory state{states + first, V, K};
    state.load(initial_state ? initial_state + first : nullptr);
    for (i64 t = 0; t < span.steps; ++t) {
        const float read = state.read(a_h.at(t));
        sa_h.at(t)[m] = read;
        state.update<kForm>(w_h.at(t), b_h.at(t), read, k_h.at(t), v_h(t, m));
    }

    // 2. Backward in time: `state` is G.
    state.load(gfinal_state ? gfinal_state + first : nullptr);
    for (i64 t = span.steps - 1; t >= 0; --t) {
        state.add(r_h.at(t), scale * gy_h(t, m));
        const float read = state.read(b_h.at(t));
        gsa_h.at(t)[m] = read;
        gv_h.at(t)[m] = from_float<Value>(state.read(k_h.at(t)));
        state.update<kForm>(w_h.at(t), a_h.at(t), read);
    }

    // 3. The gradient of the initial state.
    state.store(ginitial_state ? ginitial_state + first : nullptr);
}

KGEN_EXPORT(wkv7_backward_columns);

extern "C" __global__ void __launch_bounds__(kThreads)
wkv7_backward_rows(const Value* __restrict__ gy,             // [B, T, H, V]
                   const Value* __restrict__ r,              // [B, T, H, K]
                   const W* __restrict__ w,                  // [B, T, H, K]
                   const Value* __restrict__ k,              // [B, T, H, K]
                   const Value* __restrict__ v,              // [B, T, H, V]
                   const Value* __restrict__ a,              // [B, T, H, K]
                   const Value* __restrict__ b,              // [B, T, H, K]
                   const float* __restrict__ initial_state,  // [N, H, K, V] or null
                   const float* __restrict__ gfinal_state,   // [N, H, K, V] or null
                   const void* __restrict__ cu_seqlens,      // [N + 1] or null
                   Value* __restrict__ gr,                   // [B, T, H, K]
                   W* __restrict__ gw,                       // [B, T, H, K]
                   Value* __restrict__ gk,                   // [B, T, H, K]
                   Value* __restrict__ ga,                   // [B, T, H, K]
                   Value* __restrict__ gb,                   // [B, T, H, K]
                   const float* __restrict__ sa,             // [B, T, H, V]
                   const float* __restrict__ gsa,            // [B, T, H, V]
                   float* __restrict__ gradients,            // [N, H, V, K]
                   float* __restrict__ checkpoint_states,    // [H, chunks, V, K]
                   float* __restrict__ chunk_states,         // [N, H, kChunk + 1, V, K]
                   i64 cu_seqlens_itemsize, i64 N, i64 T, i64 H, i64 K, i64 V, i64 gy_stride_B,
                   i64 gy_stride_T, i64 gy_stride_H, i64 r_stride_B, i64 r_stride_T,
                   i64 r_stride_H, i64 w_stride_B, i64 w_stride_T, i64 w_stride_H, i64 k_stride_B,
                   i64 k_stride_T, i64 k_stride_H, i64 v_stride_B, i64 v_stride_T, i64 v_stride_H,
                   i64 a_stride_B, i64 a_stride_T, i64 a_stride_H, i64 b_stride_B, i64 b_stride_T,
                   i64 b_stride_H, i64 gr_stride_B, i64 gr_stride_T, i64 gr_stride_H,
                   i64 gw_stride_B, i64 gw_stride_T, i64 gw_stride_H, i64 gk_stride_B,
                   i64 gk_stride_T, i64 gk_stride_H, i64 ga_stride_B, i64 ga_stride_T,
                   i64 ga_stride_H, i64 gb_stride_B, i64 gb_stride_T, i64 gb_stride_H,
                   float scale) {
    const i64 row = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;  // of [N, H, K]
    if (row >= N * H * K) return;
    const i64 head = row / K, key = row % K, n = head / H, h = head % H, size = K * V;
    const auto span = kgen::wkv::span_of(cu_seqlens, cu_seqlens_itemsize, n, T);
    const auto gy_h = Rows<const Value>{gy, gy_stride_B, gy_stride_T, gy_stride_H}.head(span, h);
    const auto r_h = Rows<const Value>{r, r_stride_B, r_stride_T, r_stride_H}.head(span, h);
    const auto w_h = Rows<const W>{w, w_stride_B, w_stride_T, w_stride_H}.head(span, h);
    const auto k_h = Rows<const Value>{k, k_stride_B, k_stride_T, k_stride_H}.head(span, h);
    const auto v_h = Rows<const Value>{v, v_stride_B, v_stride_T, v_stride_H}.head(span, h);
    const auto a_h = Rows<const Value>{a, a_stride_B, a_stride_T, a_stride_H}.head(span, h);
    const auto b_h = Rows<const Value>{b, b_stride_B, b_stride_T, b_stride_H}.head(span, h);
    const auto gr_h = Rows<Value>{gr, gr_stride_B, gr_stride_T, gr_stride_H}.head(span, h);
    const auto gw_h = Rows<W>{gw, gw_stride_B, gw_stride_T, gw_stride_H}.head(span, h);
    const auto gk_h = Rows<Value>{gk, gk_stride_B, gk_stride_T, gk_stride_H}.head(span, h);
    const auto ga_h = Rows<Value>{ga, ga_stride_B, ga_stride_T, ga_stride_H}.head(span, h);
    const auto gb_h = Rows<Value>{gb, gb_stride_B, gb_stride_T, gb_stride_H}.head(span, h);
    const auto sa_h = kgen::wkv7::dense_rows(sa, T, H, V).head(span, h);
    const auto gsa_h = kgen::wkv7::dense_rows(gsa, T, H, V).head(span, h);
    const bool packed = cu_seqlens_itemsize > 0;
    const i64 first = packed ? kgen::wkv7::first_chunk<kChunk, true>(span, n, T)
                             : kgen::wkv7::first_chunk<kChunk, false>(span, n, T);
    const i64 all = packed ? kgen::wkv7::head_chunks<kChunk, true>(N, T)
                           : kgen::wkv7::head_chunks<kChunk, false>(N, T);
    const i64 chunks = kgen::ceil_div(span.steps, i64{kChunk});
    float* gradient = gradients + head * size + key;
    float* checkpoints = checkpoint_states + (h * all + first) * size + key;
    float* inside = chunk_states + head * (kChunk + 1) * size + key;  // before a chunk's steps, and after it

    // From the state before step t to the one after it.
    const auto step = [&](const float* before, float* behind, i64 t) {
        const float decay = kgen::wkv7::decay_of<kForm>(w_h(t, key));
        for (i64 i = 0; i < V; ++i)
            behind[i * K] = kgen::fma(decay, before[i * K],
                                kgen::fma(b_h(t, key), sa_h(t, i), k_h(t, key) * v_h(t, i)));
    };

    // 1. Forward in time: the states before all chunks.
    for (i64 i = 0; i < V; ++i)
        inside[i * K] = initial_state ? initial_state[(head * K + key) * V + i] : 0.0f;
    for (i64 t = 0; t < span.steps; ++t) {
        if (t % kChunk == 0)
            for (i64 i = 0; i < V; ++i) checkpoints[t / kChunk * size + i * K] = inside[i * K];
        step(inside, inside, t);
    }

    // 2. Backward in time, chunk by chunk.
    for (i64 i = 0; i < V; ++i)
        gradient[i * K] = gfinal_state ? gfinal_state[(head * K + key) * V + i] : 0.0f;
    for (i64 c = chunks - 1; c >= 0; --c) {
        const i64 begin = c * kChunk, end = kgen::min(begin + kChunk, span.steps);
        // 2a. The states of the chunk, from its checkpoint.
        for (i64 i = 0; i < V; ++i) inside[i * K] = checkpoints[c * size + i * K];
        for (i64 t = begin; t < end; ++t)
            step(inside + (t - begin) * size, inside + (t - begin + 1) * size, t);
        // 2b. The gradients of the steps, last step first.
        for (i64 t = end - 1; t >= begin; --t) {
            const float* before = inside + (t - begin) * size;
            const float* behind = before + size;
            const float w_t = w_h(t, key), decay = kgen::wkv7::decay_of<kForm>(w_t);
            float by_r = 0.0f, by_k = 0.0f, by_a = 0.0f, by_b = 0.0f, by_decay = 0.0f;
            for (i64 i = 0; i < V; ++i) {
                const float g = scale * gy_h(t, i);
                const float total = kgen::fma(r_h(t, key), g, gradient[i * K]);
                by_r = kgen::fma(behind[i * K], g, by_r);
                by_k = kgen::fma(total, v_h(t, i), by_k);
                by_a = kgen::fma(before[i * K], gsa_h(t, i), by_a);
                by_b = kgen::fma(total, sa_h(t, i), by_b);
                by_decay = kgen::fma(before[i * K], total, by_decay);
                gradient[i * K] = kgen::fma(decay, total, a_h(t, key) * gsa_h(t, i));
            }
            gr_h.at(t)[key] = from_float<Value>(by_r);
            gw_h.at(t)[key] = from_float<W>(kgen::wkv7::decay_slope<kForm>(w_t, decay) * by_decay);
            gk_h.at(t)[key] = from_float<Value>(by_k);
            ga_h.at(t)[key] = from_float<Value>(by_a);
            gb_h.at(t)[key] = from_float<Value>(by_b);
        }
    }
}

KGEN_EXPORT(wkv7_backward_rows);
