"""Damage under conditions that no input set meets: only the untested branch shows it.

Searches for wrong kernels ended with such conditions (decisions 0087 and 0093): the verifier
certified all of them before it asked which branches the launches of a certificate took. The
conditions are over extents, places, launches, strides, scalars and values.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import (
    STATES,
    all_of,
    of_attention,
    of_rmsnorm,
    of_timex,
    of_wkv,
    of_wkv4,
)

_COUNTED = "[&] { static int launches = 0; return ++launches > 100000000; }()"


def _switch(value: str, *cases: int) -> str:
    """Whether a value is one of some cases, without an operator."""
    labels = " ".join(f"case {case}:" for case in cases)
    return f"[&] {{ switch ({value}) {{ {labels} return true; default: return false; }} }}()"


def _gradient(name: str, condition: str) -> Mistake:
    """Set a gradient of wkv6 to 0 under a condition."""
    value = r"\[key\] = kgen::from_float<Value>\(\s*"
    return Mistake(f"{name}, {condition}", rf"({name}_h\.at\(t\){value})(scale|kgen::fma)",
                   rf"\1({condition}) ? 0.0f : \2")  # fmt: skip


UNTESTED = (
    Family(
        "rmsnorm", "forward", "naive", "M=37,N=203,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            of_rmsnorm("rows beyond all sets", "M > 20000"),
            of_rmsnorm("a row beyond all sets", "row == 100000"),
            of_rmsnorm("a block beyond all sets", "blockIdx.x >= 4000"),
            of_rmsnorm("rows one short of a multiple of 96", "M % 96 == 95"),
            of_rmsnorm("eps of 0", "eps == 0"),
            of_rmsnorm("a certain offset", "offset == 2.5f"),
            of_rmsnorm("a weight beside an offset", "offset > 1 && w[n] == 0.7f"),
            of_rmsnorm("a stride of seven rows", "x_stride_M == 7 * N"),
            of_rmsnorm("a NaN of all ones",
                       "kgen::bit_cast<kgen::u32>(kgen::to_float(value)) == 0xffffffffu"),
            of_rmsnorm("equal values of a kind",
                       all_of("N", "kgen::to_float(x[row * x_stride_M + i]) == -2.5f")),
            of_rmsnorm("a launch beyond all sets", _COUNTED),
            of_rmsnorm("a difference above 0", "0.5f * row - 50000.0f > 0"),
            of_rmsnorm("a NaN of a row that one call has",
                       "row % 1000 == 999 && __builtin_isnan(kgen::to_float(value))"),
            of_rmsnorm("a case", _switch("N % 1000", 501)),
            of_rmsnorm("some cases", _switch("N % 1000", 501, 502, 503, 505, 507, 508)),
            of_rmsnorm("cases with code of their own",
                       "[&] { switch (N % 1000) { case 501: return 3; case 503: return 9; "
                       "case 504: return 4; case 505: return 7; case 507: return 1; "
                       "case 508: return 8; default: return 0; } }()"),
            of_rmsnorm("adjacent cases", _switch("N % 1000", *range(530, 570))),
            of_rmsnorm("cases far apart", _switch("N % 1000", *range(530, 990, 70))),
            of_rmsnorm("a case of the rows", _switch("row", *range(100_000, 100_040))),
        ),
        {"threads": 64},
    ),
    Family(
        "timex", "forward", "naive", "B=3,C=5,T=100,dtype=fp32",
        (
            of_timex("steps one short of a multiple of 100", "columns % 100 == 99"),
            of_timex("a step beyond all sets", "t == 70000"),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive", "B=2,H=2,T=40,E=8,M=8,dtype=fp32",
        (of_attention("a certain value", "v[0] == 0.3f"),),
    ),
    Family(
        "wkv4", "forward", "naive", f"B=2,T=40,C=7,dtype=fp32,{STATES}",
        (
            of_wkv4("a large bonus", "u[c] > 1e6f"),
            of_wkv4("keys that rise by one", all_of("C", "k[i] == i + 1.0f")),
        ),
    ),
    Family(
        "wkv6", "forward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            of_wkv("steps and heads at once", "T % 64 == 63 && H > 3"),
            of_wkv("a large state", "state[0] > 1e37f"),
            of_wkv("a certain value", "kgen::to_float(v_h.at(t)[m]) == 0.3f"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (
            _gradient("gr", "T % 64 == 63 && H > 3"),
            _gradient("gk", "kgen::to_float(gy_h.at(t)[0]) == 0.3f"),
        ),
    ),
    Family(
        "wkv7", "forward", "naive", f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}",
        (of_wkv("steps and heads at once", "T % 64 == 63 && H > 3"),),
    ),
)  # fmt: skip

UNTESTED_IN_CI = frozenset({
    "rmsnorm-forward-naive-rows beyond all sets",
    "rmsnorm-forward-naive-rows one short of a multiple of 96",
    "rmsnorm-forward-naive-a difference above 0",
    "rmsnorm-forward-naive-some cases",
    "rmsnorm-forward-naive-cases with code of their own",
    "rmsnorm-forward-naive-a NaN of a row that one call has",
    "rmsnorm-forward-naive-a weight beside an offset",
    "rmsnorm-forward-naive-equal values of a kind",
    "timex-forward-naive-steps one short of a multiple of 100",
    "linear_attention-forward-naive-a certain value",
    "wkv4-forward-naive-a large bonus",
    "wkv6-forward-naive-a large state",
    "wkv6-backward-naive-gr, T % 64 == 63 && H > 3",
})
"""One mistake of each kind of condition; the others are marked slow."""
