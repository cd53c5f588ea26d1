// The recurrence of wkv7 and its gradients; the decay d of a step, and dd/dw.
//
// Per head, with g_t = scale * gy_t and G_t the gradient of the state after step t, without that step's y:
//
//     sa_t = a_t S_{t-1}                                     G'_t    = G_t + r_t g_t^T
//     S_t  = diag(d_t) S_{t-1} + b_t sa_t^T + k_t v_t^T      gsa_t   = b_t G'_t
//     y_t  = scale * r_t S_t                                 G_{t-1} = diag(d_t) G'_t + a_t gsa_t^T
//
//     gr_t = S_t g_t     gk_t = G'_t v_t     gv_t = k_t G'_t     ga_t = S_{t-1} gsa_t     gb_t = G'_t sa_t
//     gw_t = dd_t/dw_t * sum_v S_{t-1} * G'_t
//
// Rows of a state are keys, columns value features. Columns of S and of G are independent: they give y, sa, gv
// and gsa. With sa and gsa known, rows are independent too: they give gr, gk, ga, gb and gw.
//
// Layout: r, w, k, a, b [B, T, H, K], v, gy [B, T, H, V] with any strides over B, T and H; states [N, H, K, V].
// Packed sequences have B = 1 and N + 1 offsets into T.
#pragma once

#include "kgen/chunked/decay_form.cuh"
#include "kgen/wkv/tensors.cuh"

namespace kgen::wkv7 {

using kgen::wkv::Rows;
using kgen::wkv::Span;
using kgen::wkv::step_pointer;

// Whether outputs of type T are so coarse that TF32 products suffice.
template <class T>
constexpr bool kCoarse = false;
template <>
constexpr bool kCoarse<bf16> = true;

//              d                                   from, to
//     log      exp(w)                              0, 1
//     raw      exp(-exp(w))                        0, 1
//     clamp    exp(-exp(-0.5) * sigmoid(w))        0.545, 1
enum class DecayForm { log, raw, clamp };

constexpr float kClamp = 0.60653065971263342f;  // exp(-0.5): the largest -log(d) of clamp

// The DecayForm of kgen/chunked/ that computes the same decay; clamp has none.
template <DecayForm Form>
constexpr kgen::DecayForm kSharedForm =
    Form == DecayForm::raw ? kgen::DecayForm::raw : kgen::DecayForm::log;

// d of w, within 2 ulp. The argument of exp has an error of its own: 2 ulp in the form raw, 4 ulp in the form clamp.
template <DecayForm Form>
KGEN_DEVICE float decay_of(float w) {
    if constexpr (Form == DecayForm::clamp) {
        return exp(-kClamp * sigmoid(w));
    } else {
        return kgen::decay_of<kSharedForm<Form>>(w);
    }
}

// log2(d) of a w in the form clamp, by the special function unit; the error is below 1e-6.
KGEN_DEVICE float fast_clamp_log2(float w) {
    return -kClamp * kLog2e * fast_reciprocal(1.0f + fast_exp(-w));
}

// As decay_of, by the special function unit.
template <DecayForm Form>
KGEN_DEVICE float fast_decay_of(float w) {
    if constexpr (Form == DecayForm::clamp) {
        return fast_exp2(fast_clamp_log2(w));
    } else {
        return kgen::decay_of<kSharedForm<Form>, false>(w);
    }
}

// dd/dw, from w and its d.
template <DecayForm Form>
KGEN_DEVICE float decay_slope(float w, float d) {
    if constexpr (Form == DecayForm::clamp) {
        // 1 - sigmoid(w) would cancel where sigmoid(w) is near 1.
        return -kClamp * sigmoid(w) * sigmoid(-w) * d;
    } else {
        return kgen::decay_slope<kSharedForm<Form>>(w, d);
    }
}

// d log(d)/dw, by the special function unit. It is finite if w is, so that a gradient of 0 from a decay of 0 stays 0.
template <DecayForm Form>
KGEN_DEVICE float log_decay_slope(float w) {
    if constexpr (Form == DecayForm::clamp) {
        const float e = fast_exp(-abs(w)), sigmoid_of = fast_reciprocal(1.0f + e);
        return -kClamp * e * sigmoid_of * sigmoid_of;
    } else if constexpr (Form == DecayForm::raw) {
        return -fast_exp(min(w, 80.0f));
    } else {
        return 1.0f;
    }
}

}  // namespace kgen::wkv7
