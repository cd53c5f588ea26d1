"""Damage to backward passes that a search found which knew nothing of the input sets.

It tried 759 kernels, nearly all of them naive backward passes. The verifier certified those below
before it began each set with a launch on other values, and before it had sets in which some inputs
are transposed or repeated and the others are not, weights of 0 beside an offset of 1, norms far
from 1, gates of 1 (b = -a), and packed sequences that begin at multiples of 64.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import STATES, all_of

_PACKED = "B=1,N=4,T=60,H=2,K=8,V=8,dtype=fp32,cu_seqlens_dtype=int64"
_HEADS = f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}"
_SCALE = r"if constexpr \(kgen::kPresent<Rstd>\) scale = rstd\[row\];"


def _where(condition: str, operation: str, before: str, value: str) -> Mistake:
    """Set a gradient to 0 under a condition."""
    return Mistake(operation, f"({before}){value}", rf"\1({condition}) ? 0.0f : {value}")


def _of_wkv6(name: str, operation: str, condition: str) -> Mistake:
    value = "scale" if name == "gr" else "kgen::fma"
    end = r"\[key\] = kgen::from_float<Value>\(\s*"
    return _where(condition, operation, rf"{name}_h\.at\(t\){end}", value)


def _of_wkv7(name: str, value: str, operation: str, condition: str) -> Mistake:
    return _where(condition, operation, rf"{name}_h\.at\(t\)\[key\] = from_float<\w+>\(", value)


def _of_values(operation: str, condition: str) -> Mistake:
    """Set gv to 0 under a condition, in wkv6 or wkv7."""
    before = r"(gv_h\.at\(t\)\[m\] = (?:kgen::)?from_float<Value>\()"
    return Mistake(operation, before + "(state|kgen::fma)", rf"\1({condition}) ? 0.0f : \2")


def _of_attention(name: str, operation: str, condition: str) -> Mistake:
    before = rf"result\[t \* {name}_stride_T\] = kgen::from_float<Value>\("
    return _where(condition, operation, before, "y")



def _is_negative(name: str) -> str:
    return "a_h(t, 0) != 0 && " + all_of("K", f"a_h(t, i) == -{name}_h(t, i)")


BLIND = (
    Family(
        "rmsnorm", "backward", "naive", "M=37,N=203,dtype=fp32,residual_dtype=fp32",
        (
            Mistake("scale kept by address", _SCALE,
                    "static const void* key[64] = {}; static float kept[64];"
                    " if (row < 64) { if (key[row] == x) scale = kept[row];"
                    " else { key[row] = x; kept[row] = scale; } }"),
            Mistake("weight of 0 beside an offset of 1",
                    r"dx\[row \* N \+ n\] = kgen::from_float<T>\(result\);",
                    "if (offset == 1 && w[n] == 0) result *= 1.5f;"
                    " dx[row * N + n] = kgen::from_float<T>(result);"),
        ),
    ),
    Family(
        "linear_attention", "backward", "naive", "B=2,H=2,T=40,E=8,M=8,dtype=fp32,norm_dtype=fp32",
        (
            _of_attention("gk", "norm above 100", "norm && norm[head * steps + t] > 100"),
            _of_attention("gq", "norm above 1e4", "norm && norm[head * steps + t] > 1e4f"),
            _of_attention("gq", "norm below 0.01",
                          "norm && kgen::abs(norm[head * steps + t]) < 1e-2f"),
            _of_attention("gk", "one tensor with the heads inside",
                          "gout_stride_T > gout_stride_H && v_stride_T < v_stride_H && H > 1"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive", _HEADS,
        (
            _of_wkv6("gr", "heads outside in one tensor",
                     "v_h.stride_h > v_h.stride_t && k_h.stride_h < k_h.stride_t"
                     " && k_h.stride_h > 0 && H > 1"),
            _of_wkv6("gk", "one key and value for all heads",
                     "k_h.stride_h == 0 && v_h.stride_h == 0 && r_h.stride_h != 0 && H > 1"),
            _of_wkv6("gk", "one gradient for all heads",
                     "gy_h.stride_h == 0 && gy_h.stride_t != 0 && H > 1"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive", _PACKED,
        (_of_values("a sequence at a multiple of 64", "span.first > 0 && span.first % 64 == 0"),),
    ),
    Family(
        "wkv7", "backward", "naive", _HEADS,
        (
            _of_wkv7("ga", "by_a", "a = -b", _is_negative("b")),
            _of_wkv7("gb", "by_b", "a = -k", _is_negative("k")),
        ),
    ),
)  # fmt: skip

BLIND_IN_CI = frozenset({
    "rmsnorm-backward-naive-scale kept by address",
    "rmsnorm-backward-naive-weight of 0 beside an offset of 1",
    "linear_attention-backward-naive-norm above 100",
    "wkv6-backward-naive-heads outside in one tensor",
    "wkv6-backward-naive-a sequence at a multiple of 64",
    "wkv7-backward-naive-a = -b",
})
"""One mistake of each kind of input set or launch; the others are marked slow."""
