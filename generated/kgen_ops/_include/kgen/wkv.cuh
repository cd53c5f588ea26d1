// What the kernels of wkv5 and wkv6 share. wkv5's w is wkv6's with a stride of 0 over time.
//
// With g = scale * gy, n_t = v_t . g_t and G the gradient of the state:
//
//              walk       p    a    c    decay of   y, and what is added to it
//     y        forward    r    k    v    rows       y_t + (sum_k r u k) v_t, times scale
//     gr       forward    g    v    k    columns    gr_t + n_t u k_t
//     gk       backward   v    g    r    columns    gk_t + n_t u r_t
//     gv       backward   k    r    g    rows       gv_t + (sum_k r u k) g_t
//
// gw_t = dd_t/dw_t * sum_v S_{t-1} G_t needs both states at a step: S comes from states kept every
// few steps. (The published difference of running sums over all of T cancels.) With the log decay
// dd/dw is the decay d itself; decay_form.cuh has the others.
#pragma once

#include "decay_form.cuh"
#include "math.cuh"
#include "recurrence.cuh"

namespace kgen::wkv {

struct Extents {
    i64 N, T, H, K, V;  // N: sequences
};

// The steps of a sequence: a batch row, or a part of the only one.
struct Span {
    i64 b, first, steps;
};

// Sequence n of [N + 1] offsets of 4 or 8 bytes; of none (0 bytes) it is batch row n, of T steps.
KGEN_DEVICE Span span_of(const void* offsets, i64 bytes, i64 n, i64 T) {
    if (bytes == 0) return {n, 0, T};
    const auto at = [&](i64 i) {
        return bytes == 4 ? i64{static_cast<const i32*>(offsets)[i]}
                          : static_cast<const i64*>(offsets)[i];
    };
    const i64 first = at(n);
    return {0, first, at(n + 1) - first};
}

// The same of offsets whose type is known.
template <class Offset>
KGEN_DEVICE Span span_of(const Offset* offsets, i64 n, i64 T) {
    if constexpr (kPresent<Offset>) return span_of(offsets, sizeof(Offset), n, T);
    return {n, 0, T};
}

// Where sequences are known when the kernel runs: offsets, or null, of so many bytes each.
struct Offsets {
    const void* first;
    i64 bytes;

    KGEN_DEVICE Span operator()(i64 n, i64 T) const { return span_of(first, bytes, n, T); }
};

// Rows [B, T, H, features] of a tensor.
template <class T>
struct Rows {
    T* first;
    i64 of_b, of_t, of_h;

    KGEN_DEVICE Rows head(i64 b, i64 h) const {
        return Rows{first + b * of_b + h * of_h, of_b, of_t, of_h};
    }
    KGEN_DEVICE Rows head(const Span& span, i64 h) const {
        Rows its = head(span.b, h);
        its.first += span.first * of_t;
        return its;
    }
    KGEN_DEVICE T* at(i64 t) const { return first + t * of_t; }
    KGEN_DEVICE float operator()(i64 t, i64 feature) const { return to_float(at(t)[feature]); }
};

// w of a tensor [H, K]: the same at every step.
template <class T>
KGEN_DEVICE Rows<const T> of_every_step(const T* w, i64 K) {
    return Rows<const T>{w, 0, 0, K};
}

// D of a walk in memory whose rows are keys.
template <DecayForm Form, class W>
struct RowsDecay {
    static constexpr bool kDecays = true;
    Rows<const W> w;
    KGEN_DEVICE float operator()(i64 t, i64 row) const { return decay_of<Form>(w(t, row)); }
};

// D of a walk in memory whose columns are keys.
template <DecayForm Form, class W>
struct ColumnDecay {
    static constexpr bool kDecays = true;
    Rows<const W> w;
    i64 column;
    KGEN_DEVICE float operator()(i64 t, i64) const { return decay_of<Form>(w(t, column)); }
};

// sum_k r u k of a step.
template <class T, class U>
KGEN_DEVICE float bonus_of(const T* r, const U* u, const T* k, i64 extent) {
    float sum = 0.0f;
#pragma unroll 1
    for (i64 i = 0; i < extent; ++i)
        sum = fma(to_float(r[i]) * to_float(u[i]), to_float(k[i]), sum);
    return sum;
}

template <class T>
KGEN_DEVICE float dot(const T* a, const T* b, i64 extent) {
    float sum = 0.0f;
#pragma unroll 1
    for (i64 i = 0; i < extent; ++i) sum = fma(to_float(a[i]), to_float(b[i]), sum);
    return sum;
}

// Forward, a column of the state per thread of the grid, the state in memory.
template <int Threads, DecayForm Form, class T, class W, class U>
KGEN_DEVICE void forward_in_memory(Extents n, Offsets offsets, Rows<const T> r,
                                   Rows<const T> k, Rows<const T> v, Rows<const W> w,
                                   const U* u, const float* initial_state, Rows<T> y,
                                   float* final_state, float* states, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x;
    if (column >= n.N * n.H * n.V) return;
    const i64 head = column / n.V, m = column % n.V, h = head % n.H;
    const Span span = offsets(head / n.H, n.T);
    const i64 first = head * n.K * n.V + m;  // of the column, in a state
    float* state = states + first;
    for (i64 i = 0; i < n.K; ++i)
        state[i * n.V] = initial_state ? initial_state[first + i * n.V] : 0.0f;

    const auto r_h = r.head(span, h), k_h = k.head(span, h), v_h = v.head(span, h);
    const auto y_h = y.head(span, h);
    walk_in_memory<Walk::forward>(
        state, n.V, n.K, span.steps, r_h.first, r_h.of_t, k_h.first, k_h.of_t,
        [&](i64 t) { return v_h(t, m); },
        [&](i64 t, float read) {
            const float bonus = bonus_of(r_h.at(t), u + h * n.K, k_h.at(t), n.K);
            y_h.at(t)[m] = from_float<T>(scale * fma(bonus, v_h(t, m), read));
        },
        RowsDecay<Form, W>{w.head(span, h)});

    if (final_state)
        for (i64 i = 0; i < n.K; ++i) final_state[first + i * n.V] = state[i * n.V];
}

// gv, and the gradient of the initial state.
template <int Threads, DecayForm Form, class T, class W, class U>
KGEN_DEVICE void backward_v_in_memory(Extents n, Offsets offsets, Rows<const T> gy, Rows<const T> r,
                                      Rows<const T> k, Rows<const W> w, const U* u,
                                      const float* gfinal_state, Rows<T> gv, float* ginitial_state,
                                      float* states, float scale) {
    const i64 column = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x;
    if (column >= n.N * n.H * n.V) return;
    const i64 head = column / n.V, m = column % n.V, h = head % n.H;
    const Span span = offsets(head / n.H, n.T);
    const i64 first = head * n.K * n.V + m;
    float* state = states + first;
    for (i64 i = 0; i < n.K; ++i)
        state[i * n.V] = gfinal_state ? gfinal_state[first + i * n.V] : 0.0f;

    const auto r_h = r.head(span, h), k_h = k.head(span, h), gy_h = gy.head(span, h);
    const auto gv_h = gv.head(span, h);
    walk_in_memory<Walk::backward>(
        state, n.V, n.K, span.steps, k_h.first, k_h.of_t, r_h.first, r_h.of_t,
        [&](i64 t) { return scale * gy_h(t, m); },
        [&](i64 t, float read) {
            const float bonus = bonus_of(r_h.at(t), u + h * n.K, k_h.at(t), n.K);
            gv_h.at(t)[m] = from_float<T>(fma(bonus, scale * gy_h(t, m), read));
        },
        RowsDecay<Form, W>{w.head(span, h)});

    if (ginitial_state)
        for (i64 i = 0; i < n.K; ++i) ginitial_state[first + i * n.V] = state[i * n.V];
}

// Memory of `backward_k_in_memory`, each with [V, K] of a head innermost.
struct Scratch {
    float* states;      // [N, H]
    float* gradients;   // [N, H]
    float* kept;        // [B, H, chunks], packed [H, T / Chunk + N]: states before each chunk
    float* chunk;       // [N, H, Chunk]: states before each step of a chunk
};

// gr, gk, gw and what gu is a sum of, a key per thread of the grid. of_w(span, t, h, key, gw) takes
// gw_t.
template <int Threads, int Chunk, DecayForm Form, class T, class W, class U, class OfW>
KGEN_DEVICE void backward_k_in_memory(Extents n, Offsets offsets, Rows<const T> gy, Rows<const T> r,
                                      Rows<const T> k, Rows<const T> v, Rows<const W> w,
                                      const U* u, const float* initial_state,
                                      const float* gfinal_state, Rows<T> gr, Rows<T> gk,
                                      float* gu_parts, Scratch scratch, float scale, OfW of_w) {
    const i64 column = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x;
    if (column >= n.N * n.H * n.K) return;
    const i64 head = column / n.K, key = column % n.K, h = head % n.H;
    const Span span = offsets(head / n.H, n.T);
    const i64 size = n.K * n.V, chunks = ceil_div(span.steps, static_cast<i64>(Chunk));
    // Packed sequences begin anywhere: each has room for one chunk more than are before it.
    const i64 kept_before = offsets.bytes == 0
                                ? head * chunks
                                : h * (n.T / Chunk + n.N) + span.first / Chunk + head / n.H;
    float* state = scratch.states + head * size + key;
    float* gradient = scratch.gradients + head * size + key;
    float* kept = scratch.kept + kept_before * size + key;
    float* before = scratch.chunk + head * Chunk * size + key;
    const float bonus = to_float(u[h * n.K + key]);
    const auto gy_h = gy.head(span, h), r_h = r.head(span, h);
    const auto k_h = k.head(span, h), v_h = v.head(span, h);
    const auto w_h = w.head(span, h);
    const auto gr_h = gr.head(span, h), gk_h = gk.head(span, h);

    // 1. Forward in time: gr, and the states before each chunk.
    for (i64 i = 0; i < n.V; ++i)
        state[i * n.K] = initial_state ? initial_state[(head * n.K + key) * n.V + i] : 0.0f;
    walk_in_memory<Walk::forward>(
        state, n.K, n.V, span.steps, gy_h.first, gy_h.of_t, v_h.first, v_h.of_t,
        [&](i64 t) {
            if (t % Chunk == 0)
                for (i64 i = 0; i < n.V; ++i) kept[t / Chunk * size + i * n.K] = state[i * n.K];
            return k_h(t, key);
        },
        [&](i64 t, float read) {
            const float product = dot(v_h.at(t), gy_h.at(t), n.V);
            gr_h.at(t)[key] =
                from_float<T>(scale * fma(product, bonus * k_h(t, key), read));
        },
        ColumnDecay<Form, W>{w_h, key});

    // 2. Backward in time, chunk by chunk.
    for (i64 i = 0; i < n.V; ++i)
        gradient[i * n.K] = gfinal_state ? gfinal_state[(head * n.K + key) * n.V + i] : 0.0f;
    CompensatedSum gu;
    for (i64 c = chunks - 1; c >= 0; --c) {
        const i64 begin = c * Chunk, end = min(begin + Chunk, span.steps);
        for (i64 i = 0; i < n.V; ++i) {
            float s = kept[c * size + i * n.K];
            for (i64 t = begin; t < end; ++t) {
                before[(t - begin) * size + i * n.K] = s;
                s = fma(decay_of<Form>(w_h(t, key)), s, k_h(t, key) * v_h(t, i));
            }
        }
        for (i64 t = end - 1; t >= begin; --t) {
            const float of_key = w_h(t, key), decay = decay_of<Form>(of_key), query = r_h(t, key);
            float read = 0.0f, inner = 0.0f, product = 0.0f;
            for (i64 i = 0; i < n.V; ++i) {
                const float g = scale * gy_h(t, i), value = v_h(t, i), s = gradient[i * n.K];
                read = fma(s, value, read);
                inner = fma(before[(t - begin) * size + i * n.K], s, inner);
                product = fma(value, g, product);
                gradient[i * n.K] = fma(decay, s, query * g);
            }
            gk_h.at(t)[key] = from_float<T>(fma(product, bonus * query, read));
            of_w(span, t, h, key, decay_slope<Form>(of_key, decay) * inner);
            gu.add(product * query * k_h(t, key));
        }
    }
    gu_parts[column] = gu.value();
}

// Sums over the sequences, always in the same order; a thread of the grid per feature.
template <int Threads, class T>
KGEN_DEVICE void sum_batch(const float* parts, i64 N, i64 features, T* sums) {
    const i64 feature = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x;
    if (feature >= features) return;
    CompensatedSum sum;  // a plain one would lose more than the definition's, which is a tree
    for (i64 n = 0; n < N; ++n) sum.add(parts[n * features + feature]);
    sums[feature] = from_float<T>(sum.value());
}

}  // namespace kgen::wkv
