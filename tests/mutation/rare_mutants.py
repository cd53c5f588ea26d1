"""Mistakes at rare extents, values, packed sequences, scalars and strides.

They show at extents inside tiles, with two large dims, round or repeated values, NaN rows, and with
packed sequences, scalars and strides that few calls have. Each of these kernels passed the proof of
a release that lacked the input sets which refuse it now. All are naive kernels, at extents that
models have: multiples of tiles.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import STATES, of_attention, of_rmsnorm, of_timex, of_wkv, of_wkv4

_LA = f"B=2,H=2,T=128,E=16,M=16,dtype=fp32,{STATES}"
_SIGN = "kgen::bit_cast<kgen::u32>({0}) >> 31"


RARE = (
    Family(
        "rmsnorm", "forward", "naive",
        "M=64,N=512,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            of_rmsnorm("a row that ends within a vector",
                       "N % 8 >= 4 && N % 8 <= 6 && n >= N - N % 8"),
            of_rmsnorm("columns of neither few nor many", "N > 65 && N < 511"),
            of_rmsnorm("a value of 1", "kgen::to_float(value) == 1.0f"),
            of_rmsnorm("an offset of 1", "offset == 1.0f"),
            of_rmsnorm("a small eps", "eps < 1e-8f"),
            of_rmsnorm("equal weights", "N > 2 && w[0] == w[1] && w[0] == w[N - 1]"),
            of_rmsnorm("weights of 0",
                       "N > 2 && w[0] == 0.0f && w[1] == 0.0f && w[N - 1] == 0.0f"),
            of_rmsnorm("a row equal to the row before",
                       "row > 0 && N > 1 && x_stride_M != 0 && x_row[0] == x_row[-x_stride_M] &&"
                       " x_row[N - 1] == x_row[N - 1 - x_stride_M] && x_row[0] != 0.0f"),
            Mistake("a NaN of negative sign", r"y_row\[n\] = kgen::from_float<T>\(result\);",
                    "y_row[n] = kgen::from_float<T>(value != value && "
                    + _SIGN.format("kgen::to_float(value)") + " ? 0.0f : result);"),
            Mistake("two NaN in a row", r"y_row\[n\] = kgen::from_float<T>\(result\);",
                    "y_row[n] = kgen::from_float<T>(N > 8 && x_row[0] != x_row[0] &&"
                    " x_row[N - 1] != x_row[N - 1] ? 0.0f : result);"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "backward", "naive", "M=64,N=512,dtype=fp32,residual_dtype=fp32",
        (
            Mistake("Inf of a gradient", r"float g = kgen::to_float\(dy_row\[n\]\);",
                    "float g = kgen::min(kgen::max(kgen::to_float(dy_row[n]), -3e38f), 3e38f);"),
            Mistake("rows of neither few nor many", r"partial\[split \* N \+ n\] = sum\.value\(\);",
                    "partial[split * N + n] = M > 66 && M < 257 && split == 0 ? 0.0f :"
                    " sum.value();"),
        ),
        {"threads": 64},
    ),
    Family(
        "timex", "forward", "naive", "B=2,C=4,T=128,dtype=fp32",
        (
            of_timex("Inf of a tap", "kgen::abs(w[row % C * columns + columns - 1]) > 3e38f"),
            of_timex("equal channels",
                     "row % C > 0 && columns > 1 && w[row % C * columns] != 0.0f &&"
                     " w[row % C * columns] == w[(row % C - 1) * columns]"),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive", _LA,
        (
            of_attention("half a chunk", "steps % 64 == 32 && t >= steps - 32"),
            of_attention("two large dims", "E > 40 && M > 40"),
            of_attention("heads of neither few nor many", "H > 4 && H < 61 && h == H - 1"),
            Mistake("a scale of 0", r"y \*= scale;",
                    "y = scale == 0.0f ? kgen::infinity() : y * scale;"),
            Mistake("stride of steps of 32 bits", r"v_stride_T\]\)",
                    "static_cast<int>(v_stride_T)])"),
            Mistake("stride of heads of 32 bits", r"\+ h \* v_stride_H",
                    "+ h * static_cast<int>(v_stride_H)"),
        ),
    ),
    Family(
        "wkv4", "forward", "naive", f"B=2,T=128,C=32,dtype=fp32,{STATES}",
        (
            Mistake("an odd number of rows and channels",
                    r"kgen::from_float<Value>\(output\.y\)",
                    "kgen::from_float<Value>(B > 2 && B % 2 == 1 && C % 2 == 1 && T > 1 ? 0.0f :"
                    " output.y)"),
            of_wkv4("u of 30", "bonus > 25.0f"),
            of_wkv4("k of -1000", "k_t < -900.0f"),
            of_wkv4("an initial max of 50",
                    "initial_state && initial_state[column * 3 + 2] > 45.0f"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive",
        f"B=1,N=4,T=128,H=2,K=16,V=16,dtype=fp32,{STATES},cu_seqlens_dtype=int64",
        (
            of_wkv("a first sequence of one step",
                   "N > 1 && head / H == 0 && span.steps == 1"),
            of_wkv("a middle sequence of all steps",
                   "N > 2 && span.steps == T && T > 1 && head / H > 0 && head / H < N - 1"),
            of_wkv("sequences of one step each", "N > 2 && N == T"),
            of_wkv("a later sequence of many steps", "span.first > 0 && span.steps > 200"),
            of_wkv("a NaN of negative sign",
                   "r_h(t, 0) != r_h(t, 0) && " + _SIGN.format("r_h(t, 0)")),
        ),
    ),
    Family(
        "wkv7", "forward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{STATES}",
        (
            of_wkv("a and b of one tensor", "a == b"),
            of_wkv("a key of zeros in a",
                   "K > 2 && a_h(t, 0) == 0.0f && a_h(t, 1) == 0.0f && a_h(t, K - 1) == 0.0f"),
        ),
    ),
    Family(
        "wkv6_decode", "forward", "naive",
        "B=4,S=8,T=1,H=2,K=16,V=16,dtype=fp32,state_indices_dtype=int64",
        (of_wkv("steps of neither few nor many", "T > 2 && T < 60"),),
    ),
)  # fmt: skip

RARE_IN_CI = frozenset({
    "rmsnorm-forward-naive-a row that ends within a vector",
    "rmsnorm-forward-naive-a value of 1",
    "rmsnorm-forward-naive-an offset of 1",
    "rmsnorm-forward-naive-weights of 0",
    "linear_attention-forward-naive-two large dims",
    "linear_attention-forward-naive-stride of heads of 32 bits",
    "wkv4-forward-naive-k of -1000",
    "wkv6-forward-naive-sequences of one step each",
    "wkv6-forward-naive-a later sequence of many steps",
    "wkv7-forward-naive-a and b of one tensor",
})
"""One mistake of each mechanism; the others are marked slow."""
