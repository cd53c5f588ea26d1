// Sequences and tensors of wkv5 and wkv6, and the recurrences that all kernels compute.
//
// Per head, with g_t = scale * gy_t, n_t = v_t . g_t, d_t the decay of step t and G_t the gradient of the state
// after step t:
//
//     S_t     = diag(d_t) S_{t-1} + k_t v_t^T             y_t  = scale * (r_t S_{t-1} + (sum_k r u k) v_t)
//     G_{t-1} = diag(d_t) G_t + r_t g_t^T                 gr_t = S_{t-1} g_t + n_t u k_t
//                                                         gk_t = G_t v_t + n_t u r_t
//                                                         gv_t = G_t^T k_t + (sum_k r u k) g_t
//                                                         gu   = sum_t n_t r_t k_t
//     gw_t = dd_t/dw_t * sum_v S_{t-1} G_t                per key
//
// All of these are recurrences S = D S + a c^T, y = S^T p (see kgen/recurrent/recurrence.cuh):
//
//     result    loop        p    a    c    D is of    result of a step
//     y         forward     r    k    v    rows       scale * (y_t + (sum_k r u k) v_t)
//     gr        forward     g    v    k    columns    y_t + n_t u k_t
//     gk        backward    v    g    r    columns    y_t + n_t u r_t
//     gv        backward    k    r    g    rows       y_t + (sum_k r u k) g_t
//
// gw_t needs S and G at the same step. The forward loop of the backward pass writes checkpoints of S every few
// steps, and the states between two checkpoints are recomputed from the first. (The published formula, a
// difference of two running sums over all of T, cancels.)
//
// Layout: r, k [B, T, H, K], v, gy [B, T, H, V] with any strides over B, T and H; u [H, K]; w [B, T, H, K]
// (wkv6) or [H, K] (wkv5, here a stride of 0 over B and T). Packed sequences have B = 1 and N + 1 offsets into T.
#pragma once

#include "kgen/chunked/sequence.cuh"
#include "kgen/primitives/math.cuh"
#include "kgen/recurrent/recurrence.cuh"

namespace kgen::wkv {

KGEN_DEVICE bool is_finite(float x) { return x * 0.0f == 0.0f; }

// The steps of a sequence: all steps of batch row b, or for packed sequences some steps of the only batch row.
struct Span {
    i64 b, first, steps;
};

// Sequence n of [N + 1] offsets of 4 or 8 bytes; without offsets (0 bytes), batch row n of T steps.
KGEN_DEVICE Span span_of(const void* offsets, i64 bytes, i64 n, i64 T) {
    if (bytes == 0) return {n, 0, T};
    const auto at = [&](i64 i) {
        return bytes == 4 ? i64{static_cast<const i32*>(offsets)[i]}
                          : static_cast<const i64*>(offsets)[i];
    };
    const i64 first = at(n);
    return {0, first, at(n + 1) - first};
}

// The same for offsets of a type known at compile time; `none`: no offsets.
template <class Offset>
KGEN_DEVICE Span span_of(const Offset* offsets, i64 n, i64 T) {
    if constexpr (kPresent<Offset>) return span_of(offsets, sizeof(Offset), n, T);
    return {n, 0, T};
}

// A tensor [B, T, H, features] with contiguous features.
template <class T>
struct Rows {
    T* first;
    i64 stride_b, stride_t, stride_h;

    KGEN_DEVICE Rows head(i64 b, i64 h) const {
        return Rows{first + b * stride_b + h * stride_h, stride_b, stride_t, stride_h};
    }
    KGEN_DEVICE Rows head(const Span& span, i64 h) const {
        Rows its = head(span.b, h);
        its.first += span.first * stride_t;
        return its;
    }
    KGEN_DEVICE T* at(i64 t) const { return first + t * stride_t; }
    KGEN_DEVICE float operator()(i64 t, i64 feature) const { return to_float(at(t)[feature]); }
};

// w [H, K]: the same row at every step.
template <class T>
KGEN_DEVICE Rows<const T> same_at_every_step(const T* w, i64 K) {
    return Rows<const T>{w, 0, 0, K};
}

// Rows of one head, in the form that the loops of kgen/chunked/ take.
template <class T>
KGEN_DEVICE StepRows<T> step_rows(const Rows<T>& of_head) {
    return {of_head.first, of_head.stride_t};
}

// The same for a sequence. R: Rows, or rows with a `head` of their own.
template <class R>
KGEN_DEVICE auto step_rows(const R& rows, const Span& span, i64 h) {
    return step_rows(rows.head(span, h));
}

// The same, in the form that the loops of kgen/recurrent/ take.
template <class T>
KGEN_DEVICE StepPointer<T> step_pointer(const Rows<const T>& rows, const Span& span, i64 h) {
    return StepPointer<T>{rows.head(span, h).first, rows.stride_t};
}

// The accuracy of products on tensor cores: that of a returned state (fp32), or else that of the tensors.
template <class T, class State>
struct ProductOf {
    using Type = State;
};
template <class T>
struct ProductOf<T, none> {
    using Type = T;
};

}  // namespace kgen::wkv
