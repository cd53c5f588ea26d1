"""Mistakes of backward passes and fast kernels at special gradients, weights, rows and layouts.

They show with gradients as losses give them (all ones, or 0 except in one step), with weights of
zeros, tiny and huge rows, a single input with its own layout, or many partial sums. Each of these
kernels passed the proof of a release that lacked the input sets which refuse it now.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import STATES, all_of

_WKV = f"B=2,T=40,H=2,K=8,V=8,dtype=fp32,{STATES}"


def _all_pairs(rows: str, columns: str, condition: str) -> str:
    """Whether a condition of `i` and `j` holds for 0 <= i < rows and 0 <= j < columns."""
    return f"[&] {{ for (int i = 0; i < {rows}; ++i) for (int j = 0; j < {columns}; ++j)" \
           f" if (!({condition})) return false; return true; }}()"  # fmt: skip


def _dx(operation: str, condition: str) -> Mistake:
    """A wrong dx of rmsnorm."""
    return Mistake(operation, r"(float result = scale \* kgen::fma\(-xhat, mean, g\);)",
                   rf"\1 if ({condition}) result *= 1.5f;")  # fmt: skip


def _gk_timex(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"u = i % columns;",
                   f"u = i % columns; if ({condition}) {{ gk[i] = 0.0f; continue; }}")  # fmt: skip


def _scale(operation: str, condition: str) -> Mistake:
    """A wrong scale in linear_attention's gradient of v."""
    return Mistake(operation, r"(const NormGradient by\{norm \? norm \+ head \* steps : nullptr,"
                              r" nullptr, scale\};)",
                   rf"if ({condition}) scale *= 2; \1")  # fmt: skip


def _gw(operation: str, condition: str) -> Mistake:
    """A wrong gw of wkv5 and wkv6."""
    return Mistake(operation, r"kgen::decay_slope<kForm>\(w_t, decay\) \* sums\.inner",
                   f"({condition} ? 0.0f : kgen::decay_slope<kForm>(w_t, decay)"
                   " * sums.inner)")  # fmt: skip


def _gu(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"gu_parts\[column\] = gu\.value\(\);",
                   f"gu_parts[column] = {condition} ? 0.0f : gu.value();")  # fmt: skip


def _gr(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"(gr_h\.at\(t\)\[key\] = kgen::from_float<Value>\()",
                   rf"\1 {condition} ? 0.0f : ")  # fmt: skip


def _ga(operation: str, condition: str) -> Mistake:
    """A wrong ga of wkv7."""
    return Mistake(operation, r"from_float<Value>\(by_a\)",
                   f"from_float<Value>({condition} ? 0.0f : by_a)")  # fmt: skip


_GOUT = "gout[b * gout_stride_B + h * gout_stride_H + i * gout_stride_T + j]"
_ONES = _all_pairs("span.steps", "V", "gy_h(i, j) == 1.0f")
_ZEROS = _all_pairs("span.steps - 1", "V", "gy_h(i, j) == 0.0f")
_LAST = f"gy_h(span.steps - 1, 0) != 0.0f && {_ZEROS}"
_DY = "kgen::to_float(dy[row * dy_stride_M + i])"

LONE = (
    Family(
        "rmsnorm", "backward", "naive", "M=64,N=512,dtype=fp32,residual_dtype=fp32",
        (
            _dx("a gradient of ones", "M > 1 && N > 6 && " + _all_pairs(
                "M", "N", "dy[i * dy_stride_M + j] == 1.0f")),
            _dx("a middle element alone", "N > 6 && dy_row[N / 2] != 0.0f &&"
                f" {all_of('N', 'i == N / 2 || dy_row[i] == 0.0f')}"),
            _dx("a gradient above 1e8", "kgen::abs(dy_row[n]) > 1e8f"),
            _dx("only dh has gaps",
                "dh_stride_M > N && x_stride_M == N && dy_stride_M == N && M > 1"),
            _dx("a gain of ones", f"N > 6 && {all_of('N', 'w[i] == 1.0f')}"),
            Mistake("a gain of zeros", r"row_rstd\[row\] = scale;", "row_rstd[row] ="
                    f" N > 6 && {all_of('N', 'w[i] == 0.0f')} ? 1.0f : scale;"),
            Mistake("a column of one row", r"partial\[split \* N \+ n\] = sum\.value\(\);",
                    "partial[split * N + n] = M > 9 && dy[(M - 1) * dy_stride_M + n] != 0.0f &&"
                    f" {all_of('M - 1', 'dy[i * dy_stride_M + n] == 0.0f')} ? 0.0f : sum.value();"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "backward", "rows_in_registers",
        "M=64,N=512,dtype=bf16,residual_dtype=bf16",
        (
            Mistake("sums of 16 blocks", r"(column_sum<kRowLanes>\(partial, )blocks",
                    r"\1blocks > 16 ? 16 : blocks"),
            Mistake("a gradient of ones",
                    r"(values\[i\] = scale \* kgen::fma\(-xhat, mean, g\[i\]\);)",
                    rf"\1 if (M > 1 && {all_of('kN', _DY + ' == 1.0f')}) values[i] *= 1.5f;"),
        ),
        {"lanes_per_row": 32, "groups_per_block": 4, "vec": 8},
    ),
    Family(
        "timex", "backward", "naive", "B=3,C=5,T=100,dtype=fp32",
        (
            _gk_timex("a gradient of ones",
                      f"columns > 4 && {all_of('columns', 'gout[row * columns + i] == 1.0f')}"),
            _gk_timex("a middle step alone", "columns > 4 &&"
                      " gout[row * columns + columns / 2] != 0.0f && " + all_of(
                          "columns", "i == columns / 2 || gout[row * columns + i] == 0.0f")),
        ),
    ),
    Family(
        "linear_attention", "backward", "naive", f"B=2,H=2,T=40,E=8,M=8,dtype=fp32,{STATES}",
        (
            _scale("a gradient of ones",
                   f"steps > 4 && M > 3 && {_all_pairs('steps', 'M', _GOUT + ' == 1.0f')}"),
            _scale("a first element alone", "steps > 8 && M > 3 && " + _all_pairs(
                "steps", "M", f"(i + j == 0) == ({_GOUT} != 0.0f)")),
            _scale("a state of one line", "E > 3 && M > 3 && gfinal_state &&"
                   " gfinal_state[head * E * M + M - 1] != 0.0f &&"
                   f" {all_of('(E - 1) * M', 'gfinal_state[head * E * M + i + M] == 0.0f')}"),
        ),
    ),
    Family(
        "wkv4", "backward", "naive", f"B=2,T=40,C=7,dtype=fp32,{STATES}",
        (
            Mistake("tiny keys", r"from_float<Value>\(found\.gk\)",
                    "from_float<Value>(T > 4 && " + all_of(
                        "T", "k_of(i) != 0.0f && kgen::abs(k_of(i)) < 1e-6f")
                    + " ? 0.0f : found.gk)"),
            Mistake("128 batch rows", r"gw, gu, B, C\);", "gw, gu, B > 128 ? 128 : B, C);"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive", _WKV,
        (
            _gr("a gradient of ones", f"span.steps > 4 && V > 3 && {_ONES}"),
            _gr("a last step alone", f"span.steps > 4 && V > 3 && {_LAST}"),
            _gu("a bonus of zeros", f"K > 3 && {all_of('K', 'u[h * K + i] == 0.0f')}"),
            _gw("equal decays", "K > 3 && span.steps > 4 && w_h(t, key) < -0.01f &&"
                f" {all_of('K', 'w_h(t, i) == w_h(t, 0)')}"),
            _gw("a tiny gradient", "span.steps > 4 && V > 3 && gy_h(0, 0) != 0.0f &&"
                " kgen::abs(gy_h(0, 0)) < 1e-18f && gy_h(0, 1) != 0.0f"),
            _gw("a state of one number", "V > 3 && initial_state && initial_state[head * size] !="
                f" 0.0f && {all_of('size', 'initial_state[head * size + i] == 1.0f')}"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive",
        f"B=1,N=4,T=60,H=2,K=8,V=8,dtype=fp32,{STATES},cu_seqlens_dtype=int64",
        (
            _gr("a last sequence of all steps", "N > 4 && T > 0 && head / H == N - 1 &&"
                " span.steps == T"),
            _gr("sequences of 16 steps", "N > 3 && T > 40 && head / H == 2 && span.first == 32 &&"
                " span.steps == 16 && static_cast<const long long*>(cu_seqlens)[1] == 16"),
        ),
    ),
    Family(
        "wkv7", "backward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{STATES}",
        (
            _ga("a gradient of ones", f"span.steps > 4 && V > 3 && {_ONES}"),
            _ga("a of one feature", "span.steps > 4 && K > 3 && a_h(t, 0) != 0.0f &&"
                f" {all_of('K - 1', 'a_h(t, i + 1) == 0.0f')}"),
            _ga("a of equal features", "span.steps > 4 && K > 3 && a_h(t, 0) != 0.0f &&"
                f" {all_of('K', 'a_h(t, i) == a_h(t, 0)')}"),
            _ga("no a", f"span.steps > 4 && K > 3 &&"
                f" {_all_pairs('span.steps', 'K', 'a_h(i, j) == 0.0f')}"),
        ),
    ),
)  # fmt: skip

LONE_IN_CI = frozenset({
    "rmsnorm-backward-naive-a gain of zeros",
    "rmsnorm-backward-naive-only dh has gaps",
    "rmsnorm-backward-rows_in_registers-sums of 16 blocks",
    "timex-backward-naive-a gradient of ones",
    "linear_attention-backward-naive-a first element alone",
    "wkv4-backward-naive-tiny keys",
    "wkv6-backward-naive-equal decays",
    "wkv6-backward-naive-a last sequence of all steps",
    "wkv7-backward-naive-a of one feature",
})
"""One mistake of each mechanism; the others are marked slow."""
