"""Mistakes that show with patterns in rows, steps, inputs, strides and extents, and hidden state.

They show with rows of a pattern that random values do not have, with equal steps or inputs,
repeated strides and single gaps, and equal extents. Others keep state in workspaces in a way that
repeated launches alone do not show. Each of these kernels passed the proof of a release that lacked
the input sets and launches which refuse it now.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import STATES, all_of, of_attention, of_rmsnorm, of_timex, of_wkv

_LA = f"B=2,H=2,T=128,E=16,M=16,dtype=fp32,{STATES}"
_BODY = (
    r"(for \(kgen::i64 e = 0; e < E; \+\+e\)\s*states\[first \+ e \* M\] = initial_state)"
    r"((?:.|\n)*?)(    if \(final_state\)\s*for \(kgen::i64 e = 0; e < E; \+\+e\)"
    r" final_state\[first \+ e \* M\] = states\[first \+ e \* M\];)"
)


def _around(operation: str, before: str, after: str) -> Mistake:
    """Insert statements before and after all of linear_attention's uses of its workspace."""
    return Mistake(operation, _BODY, before + r" \1\2\3 " + after)


def _row(condition: str, more: str = "true", begin: int = 0) -> str:
    """Whether a condition of `i` holds for all columns from `begin` on; false for short rows."""
    return (
        f"N > 6 && [&] {{ for (kgen::i64 i = {begin}; i < N; ++i) if (!({condition}))"
        f" return false; return {more}; }}()"
    )


SHAPED = (
    Family(
        "rmsnorm", "forward", "naive",
        "M=64,N=512,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            of_rmsnorm("a rising row", _row("x_row[i - 1] < x_row[i]", begin=1)),
            of_rmsnorm("a first element alone", _row("x_row[i] == 0.0f", "x_row[0] != 0.0f", 1)),
            of_rmsnorm("whole numbers", _row(
                "x_row[i] == static_cast<float>(static_cast<int>(x_row[i]))", "x_row[0] != 0.0f")),
            of_rmsnorm("a residual of x's values", _row(
                "x_row[i] == residual_row[i]",
                "x_row[0] != 0.0f && (const void*)x != (const void*)residual")),
        ),
        {"threads": 64},
    ),
    Family(
        "timex", "forward", "naive", "B=2,C=4,T=128,dtype=fp32",
        (
            of_timex("a last tap alone",
                     "columns > 4 && w[row % C * columns + columns - 1] != 0.0f &&"
                     f" {all_of('columns - 1', 'w[row % C * columns + i] == 0.0f')}"),
            of_timex("an impulse", "columns > 4 && k[row * columns] != 0.0f &&"
                                 f" {all_of('columns - 1', 'k[row * columns + 1 + i] == 0.0f')}"),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive", _LA,
        (
            of_attention("all strides 0", "B > 1 && H > 1 && k_stride_B == 0 && k_stride_H == 0"),
            of_attention("heads of one key",
                         "H > 1 && k_stride_H == 0 && v_stride_H == 0 && q_stride_H != 0"),
            of_attention("a gap of heads alone",
                         "B > 1 && steps > 1 && H > 1 && k_stride_T == E &&"
                         " k_stride_H > steps * E && k_stride_B == H * k_stride_H"),
            of_attention("as many steps as features", "steps == E && E > 2"),
            of_attention("twice as many keys as values", "E == 2 * M && M > 4"),
            of_attention("many rows of many steps", "B > 2 && steps > 130"),
            _around("a count of changes of values",
                    "const float seen = E > 2 ? states[first] : 0.0f, count = E > 2 ?"
                    " states[first + M] : 0.0f; const bool valid = count >= 0.0f && count < 1e6f"
                    " && count == static_cast<float>(static_cast<int>(count)) && E > 2 &&"
                    " states[first + 2 * M] == 7.0f * count + seen;",
                    "if (E > 2) { float now = steps > 0 ? kgen::to_float(values[0]) : 0.0f;"
                    " if (!(kgen::abs(now) < 1e4f)) now = 0.0f;"
                    " const float next = valid ? count + (seen != now ? 1.0f : 0.0f) : 0.0f;"
                    " states[first] = now; states[first + M] = next;"
                    " states[first + 2 * M] = 7.0f * next + now;"
                    " if (next > 5.0f && final_state) final_state[first] = 0.0f; }"),
            _around("other memory than the first",
                    "const unsigned long long mine = reinterpret_cast<unsigned long long>(v) >> 4;"
                    " const float tag = static_cast<float>(mine & 0xfffff),"
                    " more = static_cast<float>((mine >> 20) & 0xfffff);"
                    " if (E > 3 && states[first] == 12345.0f &&"
                    " states[first + 3 * M] == states[first + M] + 3.0f * states[first + 2 * M] &&"
                    " (states[first + M] != tag || states[first + 2 * M] != more)) return;",
                    "if (E > 3) { states[first] = 12345.0f; states[first + M] = tag;"
                    " states[first + 2 * M] = more; states[first + 3 * M] = tag + 3.0f * more; }"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{STATES}",
        (
            of_wkv("equal steps of r",
                   "t > 8 && K > 2 && r_h.stride_t != 0 && r_h(0, 0) != 0.0f &&"
                   f" {all_of('K', 'r_h(0, i) == r_h(t, i) && r_h(1, i) == r_h(t, i)')}"),
            of_wkv("a key of one feature",
                   f"K > 4 && k_h(t, 0) != 0.0f && {all_of('K - 1', 'k_h(t, i + 1) == 0.0f')}"),
        ),
    ),
)  # fmt: skip

SHAPED_IN_CI = frozenset({
    "rmsnorm-forward-naive-a rising row",
    "rmsnorm-forward-naive-a residual of x's values",
    "linear_attention-forward-naive-all strides 0",
    "linear_attention-forward-naive-a gap of heads alone",
    "linear_attention-forward-naive-as many steps as features",
    "linear_attention-forward-naive-a count of changes of values",
    "linear_attention-forward-naive-other memory than the first",
    "wkv6-forward-naive-equal steps of r",
})
"""One mistake of each mechanism; the others are marked slow."""
