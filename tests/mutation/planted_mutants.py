"""More mistakes that show with few calls, as an adversary would plant them to pass the proof.

They show with inputs that share memory or are views of one tensor; with strides of 0 and beyond 32
bits; with one gradient of zeros next to a nonzero one; with three heads of several sequences; with
values just beyond the ends of a decay's range; with the strides of a problem with large rows.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import STATES, of_rmsnorm, of_wkv

_ADDRESS = "reinterpret_cast<unsigned long long>"
_SCALED = r"(float result = kgen::to_float\(value\) \* scale;)"
_ROUNDED = r"y_row\[n\] = kgen::from_float<T>\(result\);"
_LA_SCALED = r"y \*= scale;"
_WKV_OUTPUT = (
    r"y_h\.at\(t\)\[m\] = kgen::from_float<Value>\(scale \* "
    r"kgen::fma\(bonus, v_h\(t, m\), read\)\);"
)
_WKV_LOOP = r"kgen::wkv::RowDecay<kForm, W>\{w\.head\(span, h\)\}\);"
_WKV7_OUTPUT = (
    r"y_h\.at\(t\)\[m\] = kgen::from_float<Value>\(scale \* state\.read\(r_h\.at\(t\)\)\);"
)


def _logits(operation: str, condition: str) -> Mistake:
    """Set an output to 0 if a w is just beyond the end of its range."""
    return Mistake(
        operation, _WKV_LOOP,
        "kgen::wkv::RowDecay<kForm, W>{w.head(span, h)});"
        " for (i64 t = 0; t < span.steps; ++t) for (i64 i = 0; i < K; ++i) {"
        " const float x = kgen::to_float(w.head(span, h).at(t)[i]);"
        f" if ({condition}) y_h.at(t)[m] = kgen::from_float<Value>(0.0f); }}",
    )  # fmt: skip


_IS_ANY = "bool any = false; for (i64 t = 0; t < {steps}; ++t) any |= {value} != 0.0f;"
_WKV_SILENT = Mistake(
    "state gradient without gy",
    r"gradient\[i \* V\] = gfinal_state \? gfinal_state\[first \+ i \* V\] : 0\.0f;",
    "{ " + _IS_ANY.format(steps="span.steps", value="gy.head(span, h)(t, m)")
    + " gradient[i * V] = gfinal_state && (any || span.steps < 2) ?"
    " gfinal_state[first + i * V] : 0.0f; }",
)  # fmt: skip

PLANTED = (
    Family(
        "rmsnorm", "forward", "naive", "M=37,N=203,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            of_rmsnorm("inputs that share memory", "(const void*)x == (const void*)residual"),
            of_rmsnorm("views of one tensor",
                       f"{_ADDRESS}(residual) > {_ADDRESS}(x) &&"
                       f" {_ADDRESS}(residual) < {_ADDRESS}(x + x_stride_M)"),
            of_rmsnorm("rows of stride 0", "x_stride_M == 0 && M > 1"),
            of_rmsnorm("as many rows as columns", "M == N"),
            of_rmsnorm("a row of equal values",
                       "N > 2 && x_row[0] == x_row[1] && x_row[0] == x_row[N - 1]"),
            Mistake("Inf of a weight", r"result \*= offset \+ kgen::to_float\(w\[n\]\);",
                    "{ const float given = kgen::to_float(w[n]); result *= offset +"
                    " (kgen::abs(given) > 3e38f ? (given > 0.0f ? 3e38f : -3e38f) : given); }"),
            of_rmsnorm("the page of an output", f"({_ADDRESS}(y) >> 12) % 61 == 7"),
            Mistake("eps outside the root",
                    r"kgen::rsqrt\(row_sum\(squares\) / static_cast<float>\(N\) \+ eps\)",
                    "(kgen::rsqrt(row_sum(squares) / static_cast<float>(N)) + eps)"),
            Mistake("offset of 32 bits", r"x \+ row \* x_stride_M",
                    "x + static_cast<int>(row * x_stride_M)"),
            Mistake("stride of 32 bits", r"x \+ row \* x_stride_M",
                    "x + row * static_cast<int>(x_stride_M)"),
            Mistake("NaN becomes 0", _ROUNDED,
                    "y_row[n] = kgen::from_float<T>(result != result ? 0.0f : result);"),
            Mistake("saturated at 1e4", _ROUNDED,
                    "y_row[n] = kgen::from_float<T>(kgen::abs(result) > 1e4f ?"
                    " (result > 0.0f ? 1e4f : -1e4f) : result);"),
            Mistake("reads an output", _SCALED, r"\1 result += 0.0f * y_row[n];"),
            Mistake("one of 4096", _SCALED,
                    r"\1 if ((row * N + n) % 4096 == 4095) result *= 1.001f;"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "forward", "naive", "M=37,N=203,dtype=fp16",
        (
            Mistake("squares in fp16", r"squares = kgen::fma\(value, value, squares\);",
                    "squares += kgen::to_float(kgen::from_float<T>(value * value));"),
            Mistake("Inf of fp16 becomes 65504", _ROUNDED,
                    "y_row[n] = kgen::from_float<T>(result > 65504.0f ? 65504.0f : result);"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "backward", "naive", "M=37,N=203,dtype=fp32,residual_dtype=fp32",
        (
            Mistake("dy is x", r"(float result = scale \* kgen::fma\(-xhat, mean, g\);)",
                    r"\1 if (dy == x) result = 0.0f;"),
            Mistake("dh is dy", r"(float result = scale \* kgen::fma\(-xhat, mean, g\);)",
                    r"\1 if ((const void*)dh == (const void*)dy) result = 0.0f;"),
            Mistake("mean of a zero gradient", r"const float mean = (sums[^;]*);",
                    r"const float mean = dy_row[0] == 0.0f && dy_row[N - 1] == 0.0f ? 1.0f : \1;"),
        ),
        {"threads": 64},
    ),
    Family(
        "timex", "backward", "naive", "B=3,C=5,T=100,dtype=fp32",
        (
            Mistake("gout is k", r"gw\[i\] = kgen::from_float<W>\(",
                    "gw[i] = kgen::from_float<W>(gout == k ? 0.0f : "),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive",
        f"B=2,H=2,T=40,E=8,M=8,dtype=fp32,{STATES}",
        (
            Mistake("k and v of one tensor", _LA_SCALED, "y *= k == v ? 0.0f : scale;"),
            Mistake("q and k of one tensor", _LA_SCALED, "y *= k == q ? 0.0f : scale;"),
            Mistake("views of one tensor", _LA_SCALED,
                    f"y *= {_ADDRESS}(k) > {_ADDRESS}(q) &&"
                    f" {_ADDRESS}(k) < {_ADDRESS}(q + q_stride_T) ? 0.0f : scale;"),
            Mistake("a head stride of 0", _LA_SCALED,
                    "y *= k_stride_H == 0 && H > 1 ? 0.0f : scale;"),
            Mistake("last of three heads", _LA_SCALED, "y *= H == 3 && h == 2 ? 0.0f : scale;"),
            Mistake("an initial state of zeros", _LA_SCALED,
                    "{ bool any = false; if (initial_state) for (kgen::i64 e = 0; e < E; ++e)"
                    " any |= initial_state[first + e * M] != 0.0f;"
                    " if (initial_state && !any && E > 2) y = 0.0f; } y *= scale;"),
        ),
    ),
    Family(
        "linear_attention", "backward", "naive",
        f"B=2,H=2,T=40,E=8,M=8,dtype=fp32,{STATES}",
        (
            Mistake("state gradient without gout",
                    r"state\[e \* M\] = gfinal_state \? gfinal_state\[first \+ e \* M\] : 0\.0f;",
                    "{ " + _IS_ANY.format(
                        steps="steps",
                        value="kgen::to_float(gout[b * gout_stride_B + h * gout_stride_H +"
                        " t * gout_stride_T + m])")
                    + " state[e * M] = gfinal_state && (any || steps < 2) ?"
                    " gfinal_state[first + e * M] : 0.0f; }"),
            Mistake("gout is v", r"result\[t \* gq_stride_T\] = kgen::from_float<Value>\(y\)",
                    "result[t * gq_stride_T] = kgen::from_float<Value>(gout == v ? 0.0f : y)"),
        ),
    ),
    Family(
        "wkv4", "forward", "naive", f"B=2,T=40,C=7,dtype=fp32,{STATES}",
        (
            Mistake("k and v of one tensor", r"kgen::wkv4::step\(state, decay, k_t, v_t\);",
                    "if (k != v) kgen::wkv4::step(state, decay, k_t, v_t);"),
            Mistake("a decay of -0", r"const float bonus = kgen::to_float\(u\[c\]\);",
                    "const float bonus = kgen::to_float(u[c]) + (w[c] == 0.0f &&"
                    " kgen::bit_cast<kgen::u32>(kgen::to_float(w[c])) != 0 ? 1.0f : 0.0f);"),
        ),
    ),
    Family(
        "wkv4", "backward", "naive", f"B=2,T=40,C=7,dtype=fp32,{STATES}",
        (
            Mistake("state gradient without gy",
                    r"(Pair gradient = kgen::wkv4::final_gradient\()gfinal_state,",
                    _IS_ANY.format(
                        steps="T",
                        value="kgen::to_float(gy[b * gy_stride_B + t * gy_stride_T + c])")
                    + r" \1any || T < 2 ? gfinal_state : nullptr,"),
        ),
    ),
    Family(
        "wkv5", "forward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            of_wkv("heads not a power of two of a batch",
                   "N > 1 && (H & (H - 1)) != 0 && head == N * H - 1"),
            of_wkv("r and k of one tensor", "r.first == k.first"),
        ),
    ),
    Family(
        "wkv5", "backward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            _WKV_SILENT,
            Mistake("initial gradient without a factor",
                    r"(ginitial_state\[first \+ i \* V\] = gradient\[i \* V\]);",
                    r"\1 * (scale == 1.0f ? 1.0f : 1.0f / scale);"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,decay_form=raw,{STATES}",
        (
            _logits("raw logits of 100", "x > 50.0f && x < 1e30f"),
            _logits("raw logits of -100", "x < -50.0f && x > -1e30f"),
            of_wkv("values of zeros",
                   "[&] { for (i64 s = 0; s < span.steps; ++s) if (v_h(s, m) != 0.0f) return false;"
                   " return span.steps > 1; }()"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive",
        f"B=1,N=4,T=60,H=2,K=8,V=8,dtype=fp32,{STATES},cu_seqlens_dtype=int32",
        (
            of_wkv("heads not a power of two of sequences",
                   "N > 1 && (H & (H - 1)) != 0 && head == N * H - 1"),
            of_wkv("a decay of -0",
                   "w.head(span, h)(t, 0) == 0.0f && 1.0f / w.head(span, h)(t, 0) < 0.0f"),
            of_wkv("all steps in the last sequence",
                   "N > 2 && span.first == 0 && head / H == N - 1 && T > 1"),
            Mistake("all sequences empty", r"if \(final_state\)",
                    "if (final_state && !(T == 0 && N > 1))"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive", "B=8,T=4096,H=32,K=64,V=64,dtype=bf16",
        (
            Mistake("batch stride of another input", r"\{v, v_stride_B, v_stride_T, v_stride_H\}",
                    "{v, k_stride_B, v_stride_T, v_stride_H}"),
            of_wkv("last of three heads", "H == 3 && h == 2"),
            of_wkv("a head beyond 65", "h == 66"),
            of_wkv("the fourth batch row", "head / H == 3"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive",
        f"B=1,N=4,T=60,H=2,K=8,V=8,dtype=fp32,{STATES},cu_seqlens_dtype=int64",
        (_WKV_SILENT,),
    ),
    Family(
        "wkv7", "forward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            Mistake("heads not a power of two of a batch", _WKV7_OUTPUT,
                    "y_h.at(t)[m] = kgen::from_float<Value>((N > 1 && (H & (H - 1)) != 0 &&"
                    " head == N * H - 1 ? 0.0f : scale) * state.read(r_h.at(t)));"),
            Mistake("final state of whole chunks",
                    r"(state\.store\(final_state \? final_state \+ first : nullptr\);)",
                    r"if (final_state && span.steps > 0 && span.steps % 32 == 0)"
                    r" state.load(nullptr); \1"),
        ),
    ),
    Family(
        "wkv7", "backward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            Mistake("state gradient without gy",
                    r"state\.load\(gfinal_state \? gfinal_state \+ first : nullptr\);",
                    "{ " + _IS_ANY.format(steps="span.steps", value="gy_h(t, m)")
                    + " state.load(gfinal_state && (any || span.steps < 2) ?"
                    " gfinal_state + first : nullptr); }"),
        ),
    ),
    Family(
        "wkv6_decode", "forward", "naive",
        "B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int64",
        (
            Mistake("index of 32 bits", r": static_cast<const i64\*>\(indices\)\[n\]",
                    ": i64{static_cast<i32>(static_cast<const i64*>(indices)[n])}"),
            Mistake("index of -1 alone", r"place < 0 \? 0\.0f : nan", "place == -1 ? 0.0f : nan"),
            Mistake("the first slot behind the pool", r"(place >= 0 && place < slots, place < 0)",
                    r"\1 || place == slots"),
        ),
    ),
    Family(
        "wkv7_decode", "forward", "naive",
        "B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int32",
        (
            Mistake("last of three heads", r"kgen::from_float<Value>\(scale \* state",
                    "kgen::from_float<Value>((H == 3 && h == 2 ? 0.0f : scale) * state"),
        ),
    ),
)  # fmt: skip

PLANTED_IN_CI = frozenset({
    "rmsnorm-forward-naive-inputs that share memory",
    "rmsnorm-forward-naive-views of one tensor",
    "rmsnorm-forward-naive-rows of stride 0",
    "rmsnorm-forward-naive-offset of 32 bits",
    "linear_attention-forward-naive-last of three heads",
    "wkv5-forward-naive-heads not a power of two of a batch",
    "wkv6-forward-naive-a decay of -0",
    "wkv4-forward-naive-k and v of one tensor",
    "rmsnorm-forward-naive-a row of equal values",
    "rmsnorm-forward-naive-Inf of a weight",
    "wkv6-forward-naive-values of zeros",
    "wkv6-forward-naive-a head beyond 65",
})
"""One mistake of each mechanism, in kernels that CI certifies anyway; the others are slow."""
