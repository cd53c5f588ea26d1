"""Mistakes at whole tiles, inputs with different layouts, runs of zeros and rows of one sign.

There are also reads of shared memory that no thread writes. Each of these kernels passed the proof
of a release that lacked the input sets which refuse it now.
"""

from __future__ import annotations

from family_mutants import Family, Mistake
from naive_mistakes import (
    STATES,
    all_of,
    of_attention,
    of_rmsnorm,
    of_scale,
    of_timex,
    of_wkv,
    of_wkv4,
)

_ADDRESS = "reinterpret_cast<unsigned long long>({0})"


LAID = (
    Family(
        "rmsnorm", "forward", "naive",
        "M=64,N=512,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            of_rmsnorm("an address of 32 bytes", f"{_ADDRESS.format('x')} % 64 == 32"),
            of_rmsnorm("unlike addresses",
                       f"{_ADDRESS.format('x')} % 16 != {_ADDRESS.format('residual')} % 16"),
            of_rmsnorm("only the residual is dense",
                       "x_stride_M > N && residual_stride_M == N"),
            of_rmsnorm("only x is dense", "x_stride_M == N && residual_stride_M > N"),
            of_rmsnorm("overlapping rows", "x_stride_M > 0 && x_stride_M < N && N > 1"),
            of_rmsnorm("a tile of 32 columns", "N == 32"),
            of_rmsnorm("two tiles of 128 columns", "N == 256"),
            of_rmsnorm("four rows", "M == 4"),
            of_rmsnorm("zeros up to the middle",
                       f"N > 40 && {all_of('16', 'kgen::to_float(x_row[i]) == 0.0f')} &&"
                       " kgen::to_float(x_row[N - 1]) != 0.0f"),
            of_rmsnorm("shared memory of zeros",
                       "[&] { __shared__ float seen[8]; return seen[threadIdx.x % 8] != 0.0f; }()"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "backward", "naive", "M=64,N=512,dtype=fp32,residual_dtype=fp32",
        (
            Mistake("a tile of 32 rows", r"partial\[split \* N \+ n\] = sum\.value\(\);",
                    "partial[split * N + n] = M == 32 ? 0.0f : sum.value();"),
        ),
        {"threads": 64},
    ),
    Family(
        "timex", "forward", "naive", "B=2,C=4,T=128,dtype=fp32",
        (
            of_timex("a tile of 32 steps", "columns == 32"),
            of_timex("four rows", "B == 4"),
            of_timex("a run of zeros",
                     "columns > 40 && t > 40 && k[row * columns + t] != 0.0f &&"
                     f" {all_of('12', 'k[row * columns + 22 + i] == 0.0f')}"),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive",
        f"B=2,H=2,T=128,E=16,M=16,dtype=fp32,{STATES}",
        (
            of_attention("a tile of 16 steps", "steps == 16"),
            of_attention("tiles of 256 steps", "steps == 256"),
            of_attention("32 features", "E == 32"),
            of_attention("four batch rows", "B == 4"),
            of_attention("16 heads", "H == 16"),
            of_attention("only q is dense",
                         "q_stride_T == E && k_stride_T > E && steps > 1"),
            of_attention("overlapping steps",
                         "v_stride_T > 0 && v_stride_T < M && steps > 1 && M > 1"),
            of_attention("values that begin late",
                         f"t > 20 && {all_of('16', 'values[i * v_stride_T] == 0.0f')} &&"
                         " values[t * v_stride_T] != 0.0f"),
        ),
    ),
    Family(
        "wkv4", "forward", "naive", f"B=2,T=128,C=32,dtype=fp32,{STATES}",
        (
            of_wkv4("a tile of 32 steps", "T == 32"),
            of_wkv4("16 channels", "C == 16"),
            of_wkv4("only k is dense", "k_stride_T == C && v_stride_T > C && T > 1"),
            of_wkv4("values that begin late",
                    f"t > 20 && {all_of('16', 'v[i * v_stride_T] == 0.0f')} && v_t != 0.0f"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive",
        f"B=1,N=4,T=128,H=2,K=16,V=16,dtype=fp32,{STATES},cu_seqlens_dtype=int64",
        (
            of_wkv("sequences of equal length",
                   "N > 2 && T > N && T % N == 0 && head / H == N - 1 && span.steps == T / N &&"
                   " span.first == T - T / N &&"
                   " static_cast<const long long*>(cu_seqlens)[1] == span.steps"),
            of_wkv("two empty sequences before",
                   "N > 3 && head / H > 1 && span.first > 0 && span.steps > 0 &&"
                   " static_cast<const long long*>(cu_seqlens)[head / H - 2] == span.first"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{STATES}",
        (
            of_wkv("a tile of 32 steps", "T == 32"),
            of_wkv("32 heads", "H == 32"),
            of_wkv("keys that begin late",
                   f"t > 20 && {all_of('16', 'k_h(i, 0) == 0.0f')} && k_h(t, 0) != 0.0f"),
            of_wkv("values below zero", f"t > 20 && {all_of('16', 'v_h(i, m) < 0.0f')}"),
        ),
    ),
    Family(
        "wkv6", "forward", "chunk_halving",
        f"B=2,T=128,H=2,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw,{STATES}",
        (of_scale("a tile of 16 steps", "T == 16"), of_scale("four heads", "H == 4")),
    ),
    Family(
        "wkv7", "forward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{STATES}",
        (
            of_wkv("a tile of 32 steps", "T == 32"),
            of_wkv("transitions that begin late",
                   f"t > 20 && {all_of('16', 'a_h(i, 0) == 0.0f')} && a_h(t, 0) != 0.0f"),
        ),
    ),
    Family(
        "wkv7", "backward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{STATES}",
        (
            of_scale("a tile of 16 steps", "T == 16"),
            Mistake("no gradient of the last steps", r"from_float<Value>\(by_a\)",
                    "from_float<Value>(span.steps > 20 && t < span.steps - 16 &&"
                    f" {all_of('16', 'gy_h(span.steps - 1 - i, 0) == 0.0f')} &&"
                    " gy_h(0, 0) != 0.0f ? 0.0f : by_a)"),
        ),
    ),
    Family(
        "wkv6_decode", "forward", "naive",
        "B=4,S=8,T=1,H=2,K=16,V=16,dtype=fp32,state_indices_dtype=int64",
        (
            of_wkv("32 sequences", "B == 32"),
            of_wkv("four steps", "T == 4"),
            of_wkv("as many slots as sequences", "S == B && B > 1"),
        ),
    ),
)  # fmt: skip

LAID_IN_CI = frozenset({
    "rmsnorm-forward-naive-unlike addresses",
    "rmsnorm-forward-naive-only x is dense",
    "rmsnorm-forward-naive-overlapping rows",
    "rmsnorm-forward-naive-two tiles of 128 columns",
    "rmsnorm-forward-naive-shared memory of zeros",
    "linear_attention-forward-naive-16 heads",
    "wkv4-forward-naive-values that begin late",
    "wkv6-forward-naive-two empty sequences before",
    "wkv6-forward-naive-values below zero",
})
"""One mistake of each mechanism; the others are marked slow."""
