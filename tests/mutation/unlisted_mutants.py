"""Damage that a search for wrong kernels found which knew nothing of the input sets.

It tried 791 kernels. The verifier certified those below before it had decays of nearly 0, NaN at
both ends of every second sequence, negative norms, rows far below eps, outliers beside a residual,
zeros in a row with NaN, and pools of states that are gigabytes apart.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import STATES, of_wkv4

_ROUNDED = r"y_row\[n\] = kgen::from_float<T>\(result\);"
_POOL = "kgen/wkv/state_pool"

UNLISTED = (
    Family(
        "rmsnorm", "forward", "naive", "M=37,N=203,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            Mistake("rows far below eps", _ROUNDED,
                    "if (1.0f / (scale * scale) < eps * 1.01f) result *= 100.0f;"
                    " y_row[n] = kgen::from_float<T>(result);"),
            Mistake("outliers beside a residual", _ROUNDED,
                    "if (kgen::abs(kgen::to_float(value) * scale) > 8.0f) result *= 0.5f;"
                    " y_row[n] = kgen::from_float<T>(result);"),
            Mistake("zeros in a row with NaN", _ROUNDED,
                    "if (kgen::to_float(value) == 0.0f) result = 0.0f;"
                    " y_row[n] = kgen::from_float<T>(result);"),
        ),
        {"threads": 64},
    ),
    Family(
        "linear_attention", "forward", "naive", "B=2,H=2,T=40,E=8,M=8,dtype=fp32,norm_dtype=fp32",
        (
            Mistake("sign of the norm", r"y /= norm\[head \* steps \+ t\];",
                    "y /= kgen::abs(norm[head * steps + t]);"),
        ),
    ),
    Family(
        "linear_attention", "backward", "naive", "B=2,H=2,T=40,E=8,M=8,dtype=fp32,norm_dtype=fp32",
        (
            Mistake("sign of the norm", r"return norm \? scale / norm\[t\] : scale;",
                    "return norm ? scale / kgen::abs(norm[t]) : scale;"),
            Mistake("sign of the norm's gradient",
                    r"return -scale \* gout_dot_out\[t\] / norm\[t\];",
                    "return -scale * gout_dot_out[t] / kgen::abs(norm[t]);"),
        ),
    ),
    Family(
        "wkv4", "forward", "naive", f"B=2,T=40,C=7,dtype=fp32,{STATES}",
        (
            Mistake("decay near 1",
                    r"(const float decay = )(kgen::wkv4::log_decay<kForm>"
                    r"\(kgen::to_float\(w\[c\]\)\));",
                    r"float decay = \2; if (decay > -1e-3f) decay = 0.0f;"),
            of_wkv4("a decay of 1 beside others", "C > 1 && w[c] == 0 && w[(c + 1) % C] != 0"),
        ),
    ),
    Family(
        "wkv5", "forward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            Mistake("small decay", r"return decay_of<Form>\(w\(t, row\)\);",
                    "const float d = decay_of<Form>(w(t, row)); return d < 1e-4f ? 0.0f : d;",
                    "kgen/wkv/naive"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive",
        f"B=1,N=4,T=128,H=2,K=16,V=16,dtype=fp32,{STATES},cu_seqlens_dtype=int64",
        tuple(
            Mistake(f"{name} of the next sequence", r"(y_h\.at\(t\)\[m\] = )([^;]*);",
                    f"float next = 0.0f; if (t + 1 == span.steps && span.first + span.steps < T)"
                    f" next = 0.0f * kgen::to_float({name}_h.at(span.steps)[0]);"
                    r" \1kgen::from_float<Value>(kgen::to_float(\2) + next);")
            for name in ("k", "r")
        ),
    ),
    Family(
        "wkv6_decode", "forward", "naive",
        "B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int64",
        (
            Mistake("32 bits of a slot's offset", r"first \+ slot \* stride_s \+ h \* stride_h",
                    "first + static_cast<int>(slot) * static_cast<int>(stride_s) + h * stride_h",
                    _POOL),
            Mistake("32 bits of a head's offset", r"first \+ slot \* stride_s \+ h \* stride_h",
                    "first + slot * stride_s + static_cast<int>(h) * static_cast<int>(stride_h)",
                    _POOL),
        ),
    ),
)  # fmt: skip

UNLISTED_IN_CI = frozenset({
    "rmsnorm-forward-naive-rows far below eps",
    "rmsnorm-forward-naive-outliers beside a residual",
    "rmsnorm-forward-naive-zeros in a row with NaN",
    "linear_attention-forward-naive-sign of the norm",
    "wkv4-forward-naive-decay near 1",
    "wkv5-forward-naive-small decay",
    "wkv6-forward-naive-k of the next sequence",
    "wkv6_decode-forward-naive-32 bits of a slot's offset",
})
"""One mistake of each kind of input set; the others are marked slow."""
