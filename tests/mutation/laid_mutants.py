"""Damage at whole tiles, at inputs that are laid out unlike each other, at runs of zeros, and at
rows of one sign; and shared memory that nobody writes.

Each of these kernels passed the proof of a release before the sets that refuse it.
"""

from __future__ import annotations

from family_mutants import Family, Mistake

_STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
_ADDRESS = "reinterpret_cast<unsigned long long>({0})"


def _rmsnorm(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"(float result = kgen::to_float\(value\) \* scale;)",
                   rf"\1 if ({condition}) result *= 1.5f;")  # fmt: skip


def _timex(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"t, columns\);",
                   f"t, columns); if ({condition}) {{ out[i] = 0.0f; continue; }}")  # fmt: skip


def _attention(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"y \*= scale;", f"y *= {condition} ? 0.0f : scale;")


def _wkv4(operation: str, condition: str) -> Mistake:
    return Mistake(operation, r"kgen::from_float<Value>\(output\.y\)",
                   f"kgen::from_float<Value>({condition} ? 0.0f : output.y)")  # fmt: skip


def _wkv(operation: str, condition: str) -> Mistake:
    """Of wkv5, wkv6, wkv7 and their decode operators."""
    return Mistake(operation, r"(y_h\.at\(t\)\[m\] = kgen::from_float<Value>\()(scale \*)",
                   rf"\1 {condition} ? 0.0f : \2")  # fmt: skip


def _scale(operation: str, condition: str) -> Mistake:
    """Of any kernel that takes a scale."""
    return Mistake(operation, r"float scale\) \{", f"float scale) {{ if ({condition}) scale *= 2;")


def _all(count: str, condition: str) -> str:
    """Whether a condition of `i` holds for 0 <= i < count."""
    return f"[&] {{ for (int i = 0; i < {count}; ++i) if (!({condition})) return false;" \
           " return true; }()"  # fmt: skip


LAID = (
    Family(
        "rmsnorm", "forward", "naive",
        "M=64,N=512,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32",
        (
            _rmsnorm("an address of 32 bytes", f"{_ADDRESS.format('x')} % 64 == 32"),
            _rmsnorm("unlike addresses",
                     f"{_ADDRESS.format('x')} % 16 != {_ADDRESS.format('residual')} % 16"),
            _rmsnorm("only the residual is dense",
                     "x_stride_M > N && residual_stride_M == N"),
            _rmsnorm("only x is dense", "x_stride_M == N && residual_stride_M > N"),
            _rmsnorm("overlapping rows", "x_stride_M > 0 && x_stride_M < N && N > 1"),
            _rmsnorm("a tile of 32 columns", "N == 32"),
            _rmsnorm("two tiles of 128 columns", "N == 256"),
            _rmsnorm("four rows", "M == 4"),
            _rmsnorm("zeros up to the middle",
                     f"N > 40 && {_all('16', 'kgen::to_float(x_row[i]) == 0.0f')} &&"
                     " kgen::to_float(x_row[N - 1]) != 0.0f"),
            _rmsnorm("shared memory of zeros",
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
            _timex("a tile of 32 steps", "columns == 32"),
            _timex("four rows", "B == 4"),
            _timex("a run of zeros",
                   "columns > 40 && t > 40 && k[row * columns + t] != 0.0f &&"
                   f" {_all('12', 'k[row * columns + 22 + i] == 0.0f')}"),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive",
        f"B=2,H=2,T=128,E=16,M=16,dtype=fp32,{_STATES}",
        (
            _attention("a tile of 16 steps", "steps == 16"),
            _attention("tiles of 256 steps", "steps == 256"),
            _attention("32 features", "E == 32"),
            _attention("four batch rows", "B == 4"),
            _attention("16 heads", "H == 16"),
            _attention("only q is dense",
                       "q_stride_T == E && k_stride_T > E && steps > 1"),
            _attention("overlapping steps",
                       "v_stride_T > 0 && v_stride_T < M && steps > 1 && M > 1"),
            _attention("values that begin late",
                       f"t > 20 && {_all('16', 'values[i * v_stride_T] == 0.0f')} &&"
                       " values[t * v_stride_T] != 0.0f"),
        ),
    ),
    Family(
        "wkv4", "forward", "naive", f"B=2,T=128,C=32,dtype=fp32,{_STATES}",
        (
            _wkv4("a tile of 32 steps", "T == 32"),
            _wkv4("16 channels", "C == 16"),
            _wkv4("only k is dense", "k_stride_T == C && v_stride_T > C && T > 1"),
            _wkv4("values that begin late",
                  f"t > 20 && {_all('16', 'v[i * v_stride_T] == 0.0f')} && v_t != 0.0f"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive",
        f"B=1,N=4,T=128,H=2,K=16,V=16,dtype=fp32,{_STATES},cu_seqlens_dtype=int64",
        (
            _wkv("sequences of equal length",
                 "N > 2 && T > N && T % N == 0 && head / H == N - 1 && span.steps == T / N &&"
                 " span.first == T - T / N &&"
                 " static_cast<const long long*>(cu_seqlens)[1] == span.steps"),
            _wkv("two empty sequences before",
                 "N > 3 && head / H > 1 && span.first > 0 && span.steps > 0 &&"
                 " static_cast<const long long*>(cu_seqlens)[head / H - 2] == span.first"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{_STATES}",
        (
            _wkv("a tile of 32 steps", "T == 32"),
            _wkv("32 heads", "H == 32"),
            _wkv("keys that begin late",
                 f"t > 20 && {_all('16', 'k_h(i, 0) == 0.0f')} && k_h(t, 0) != 0.0f"),
            _wkv("values below zero", f"t > 20 && {_all('16', 'v_h(i, m) < 0.0f')}"),
        ),
    ),
    Family(
        "wkv6", "forward", "chunk_halving",
        f"B=2,T=128,H=2,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw,{_STATES}",
        (_scale("a tile of 16 steps", "T == 16"), _scale("four heads", "H == 4")),
    ),
    Family(
        "wkv7", "forward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{_STATES}",
        (
            _wkv("a tile of 32 steps", "T == 32"),
            _wkv("transitions that begin late",
                 f"t > 20 && {_all('16', 'a_h(i, 0) == 0.0f')} && a_h(t, 0) != 0.0f"),
        ),
    ),
    Family(
        "wkv7", "backward", "naive", f"B=2,T=128,H=2,K=16,V=16,dtype=fp32,{_STATES}",
        (
            _scale("a tile of 16 steps", "T == 16"),
            Mistake("no gradient of the last steps", r"from_float<Value>\(by_a\)",
                    "from_float<Value>(span.steps > 20 && t < span.steps - 16 &&"
                    f" {_all('16', 'gy_h(span.steps - 1 - i, 0) == 0.0f')} &&"
                    " gy_h(0, 0) != 0.0f ? 0.0f : by_a)"),
        ),
    ),
    Family(
        "wkv6_decode", "forward", "naive",
        "B=4,S=8,T=1,H=2,K=16,V=16,dtype=fp32,state_indices_dtype=int64",
        (
            _wkv("32 sequences", "B == 32"),
            _wkv("four steps", "T == 4"),
            _wkv("as many slots as sequences", "S == B && B > 1"),
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
"""One of each mechanism; the others are marked slow."""
