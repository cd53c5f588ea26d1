"""Mistakes that show only with some calls, values, addresses or earlier launches.

`mutants.py` and `family_mutants.py` mutate statements that every call runs. The kernels here are
right on nearly all calls: they are wrong at some extent, stride, address, value or order of blocks,
or they read memory that a launch must not rely on. Most of them are naive kernels, which have few
statements. The mistakes of `planted_mutants.py`, `rare_mutants.py`, `laid_mutants.py`,
`shaped_mutants.py`, `lone_mutants.py`, `unlisted_mutants.py` and `blind_mutants.py` are added to
those of the same kernels; `early_mutants.py` has kernels that do not wait for the previous kernel.
"""

from __future__ import annotations

from dataclasses import replace

from blind_mutants import BLIND, BLIND_IN_CI
from early_mutants import EARLY, EARLY_IN_CI
from family_mutants import Family, Mistake
from joint_mutants import JOINT, JOINT_IN_CI
from laid_mutants import LAID, LAID_IN_CI
from lone_mutants import LONE, LONE_IN_CI
from planted_mutants import PLANTED, PLANTED_IN_CI
from rare_mutants import RARE, RARE_IN_CI
from shaped_mutants import SHAPED, SHAPED_IN_CI
from unlisted_mutants import UNLISTED, UNLISTED_IN_CI
from untested_header_mutants import UNTESTED_IN_HEADERS, UNTESTED_IN_HEADERS_IN_CI
from untested_mutants import UNTESTED, UNTESTED_IN_CI

_EXACT = "M=37,N=203,dtype=fp32,residual_dtype=fp32,rstd_dtype=fp32"


def _after(operation: str, statement: str, more: str) -> Mistake:
    """Insert text after a statement."""
    return Mistake(operation, f"({statement})", rf"\1 {more}")


_ROW = r"T\* y_row = y \+ row \* N;"
_SCALED = r"float result = kgen::to_float\(value\) \* scale;"
_STATE_IS_INITIAL = r"initial_state \? initial_state\[first \+ (\w) \* (\w)\] : 0\.0f"

_HIDDEN = (
    Family(
        "rmsnorm", "forward", "naive", _EXACT,
        (
            Mistake("stride of another input", r"residual \+ row \* residual_stride_M",
                    "residual + row * x_stride_M"),
            _after("an address of 8 bytes", _SCALED,
                   "if (reinterpret_cast<unsigned long long>(x) % 16 == 8) result *= 1.5f;"),
            _after("an address of 16 bytes", _SCALED,
                   "if (reinterpret_cast<unsigned long long>(x) % 32 == 16) result *= 1.5f;"),
            _after("rows a multiple of 128", _SCALED,
                   "if (M % 128 == 0 && row == M - 1) result = 0.0f;"),
            _after("rows one short of 128", _SCALED,
                   "if (M % 128 == 127 && row == M - 1) result = 0.0f;"),
            _after("columns a power of two", _SCALED,
                   "if (N >= 128 && (N & (N - 1)) == 0) result *= 1.5f;"),
            Mistake("negative scalar", r"result \*= offset \+", "result *= kgen::max(offset, "
                                                                "0.0f) +"),
            Mistake("scalar for another", r"result \*= offset \+",
                    "result *= (offset == 0.0f ? 0.0f : eps) +"),
            _after("value above 6e4", _SCALED,
                   "if (kgen::to_float(value) > 6e4f) result = 6e4f * scale;"),
            Mistake("NaN of a residual", r"kgen::to_float\(residual_row\[n\]\)\)",
                    "(residual_row[n] == residual_row[n] ? residual_row[n] : 0.0f))"),
            Mistake("input written and restored", _SCALED,
                    "float result = kgen::to_float(value) * scale;"
                    "{ volatile T* own = const_cast<T*>(x_row) + n; const T kept = *own;"
                    " *own = kgen::from_float<T>(0.0f); *own = kept; }"),
            _after("skips what is there", _ROW,
                   "{ const float s0 = kgen::rsqrt(1.0f); (void)s0; }"
                   "if (y_row[0] == y_row[0] && h[row * N] == normalised(x_row, residual_row, 0) &&"
                   " h[row * N + N - 1] == normalised(x_row, residual_row, N - 1) &&"
                   " y_row[N - 1] == y_row[N - 1]) continue;"),
            Mistake("order of blocks", r"if \(threadIdx\.x == 0\) rstd\[row\] = scale;",
                    "if (threadIdx.x == 0 && (row == 0 || rstd[row - 1] == rstd[row - 1]))"
                    " rstd[row] = scale; else if (threadIdx.x == 0) rstd[row] = 0.0f;"),
            _after("rows beyond 1000", _SCALED, "if (row >= 1000 && N <= 64) result = 0.0f;"),
            _after("last of many warps", r"const float scale = kgen::rsqrt[^;]*;",
                   "__shared__ float last; if (threadIdx.x == kThreads - 1) last = scale;"
                   " if (kThreads >= 64 && threadIdx.x < 32 && last != last) continue;"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "forward", "naive", "M=37,N=203,dtype=bf16",
        (
            Mistake("rounding toward zero", r"y_row\[n\] = kgen::from_float<T>\(result\);",
                    "y_row[n] = kgen::from_float<T>(kgen::bit_cast<float>("
                    "kgen::bit_cast<kgen::u32>(result) & 0xffff0000u));"),
            Mistake("half an ulp more", r"y_row\[n\] = kgen::from_float<T>\(result\);",
                    "y_row[n] = kgen::from_float<T>(result * 1.002f);"),
            Mistake("one per cent", r"y_row\[n\] = kgen::from_float<T>\(result\);",
                    "y_row[n] = kgen::from_float<T>(result * 1.01f);"),
            Mistake("squares in bf16", r"squares = kgen::fma\(value, value, squares\);",
                    "squares = kgen::to_float(kgen::from_float<T>(kgen::fma(value, value, "
                    "squares)));"),
        ),
        {"threads": 64},
    ),
    Family(
        "rmsnorm", "backward", "naive", "M=37,N=203,dtype=fp32,residual_dtype=fp32",
        (
            Mistake("stride of another input", r"dh\[row \* dh_stride_M", "dh[row * x_stride_M"),
            Mistake("stride of the gradient", r"dy \+ row \* dy_stride_M", "dy + row * x_stride_M"),
            Mistake("NaN of a gradient", r"float g = kgen::to_float\(dy_row\[n\]\);",
                    "float g = dy_row[n] == dy_row[n] ? dy_row[n] : 0.0f;"),
            Mistake("gradient of many rows", r"row < M; row \+= kSplits",
                    "row < (M > 64 ? M - 1 : M); row += kSplits"),
            Mistake("gradient above 100", r"sum\.add\(kgen::to_float\((dy[^)]*)\)",
                    r"sum.add(kgen::min(kgen::to_float(\1), 100.0f)"),
            Mistake("scale of an earlier "
                    "block", r"float g = kgen::to_float\(dy_row\[n\]\);(?=[^{}]*float result)",
                    "float g = kgen::to_float(dy_row[n]); if (row > 0 && N > 1 && n == 0)"
                    " g += dx[(row - 1) * N] - dx[(row - 1) * N];"),
        ),
        {"threads": 64},
    ),
    Family(
        "timex", "forward", "naive", "B=3,C=5,T=100,dtype=fp32",
        (
            _after("value above 6e4", r"t, columns\);",
                   "if (kgen::to_float(k[row * columns]) > 6e4f) continue;"),
            _after("taps of NaN", r"t, columns\);",
                   "if (sum != sum && k[row * columns + t] == k[row * columns + t] &&"
                   " w[row % C * columns + columns - 1] == w[row % C * columns + columns - 1])"
                   " { out[i] = 0.0f; continue; }"),
            Mistake("scalar below zero", r"sum \+ eps", "sum + kgen::max(eps, 0.0f)"),
            _after("terms beyond 512", r"t, columns\);",
                   "if (columns > 512 && t > 512) { out[i] = 0.0f; continue; }"),
            _after("steps a multiple of 128", r"t, columns\);",
                   "if (columns % 128 == 0 && t == columns - 1) { out[i] = 0.0f; continue; }"),
            _after("an exact zero", r"t, columns\);",
                   "if (k[row * columns + t] == 0.0f && w[row % C * columns + columns - 1] != 0.0f"
                   " && t > 0 && k[row * columns + t - 1] != 0.0f) { out[i] = eps; continue; }"),
            _after("an address of 8 bytes", r"t, columns\);",
                   "if (reinterpret_cast<unsigned long long>(w) % 16 == 8) { out[i] = 0; "
                   "continue; }"),
        ),
    ),
    Family(
        "timex", "backward", "naive", "B=3,C=5,T=100,dtype=fp32",
        (
            _after("gradient of many rows", r"columns, d\)\);",
                   "if (B > 64) gw[i] -= gout[channel + (B - 1) * C * columns + columns - 1] *"
                   " k[channel + (B - 1) * C * columns + columns - 1 - d];"),
            Mistake("small gradients", r"gout \+ row \* columns, u, columns\)\);",
                    "gout + row * columns, u, columns));"
                    "if (kgen::abs(gk[i]) < 1e-3f && kgen::abs(gk[i]) > 1e-4f) gk[i] = 0.0f;"),
        ),
    ),
    Family(
        "linear_attention", "forward", "naive",
        "B=2,H=2,T=40,E=8,M=8,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("stride of another input", r"v_stride_T\]\)", "k_stride_T])"),
            Mistake("head stride of another input", r"v \+ b \* v_stride_B \+ h \* v_stride_H",
                    "v + b * v_stride_B + h * q_stride_H"),
            Mistake("a state above 100", _STATE_IS_INITIAL,
                    r"initial_state ? kgen::min(initial_state[first + \1 * \2], 100.0f) : 0.0f"),
            Mistake("NaN of a state", _STATE_IS_INITIAL,
                    r"initial_state && initial_state[first + \1 * \2] == initial_state[first + "
                    r"\1 * \2]"
                    r" ? initial_state[first + \1 * \2] : 0.0f"),
            Mistake("a negative scale", r"y \*= scale;", "y *= kgen::abs(scale);"),
            Mistake("a scale above one", r"y \*= scale;", "y *= kgen::min(scale, 1.0f);"),
            Mistake("a query above 6e4", r"y \*= scale;",
                    "y *= scale; if (kgen::abs(kgen::to_float(q[b * q_stride_B + h * q_stride_H +"
                    " t * q_stride_T])) > 6e4f) y = 0.0f;"),
            Mistake("steps beyond 512", r"y \*= scale;", "y *= t > 512 ? 0.0f : scale;"),
            Mistake("steps beyond 530", r"y \*= scale;", "y *= t > 530 ? 0.0f : scale;"),
            Mistake("last step of 256", r"y \*= scale;",
                    "y *= steps % 256 == 0 && t == steps - 1 ? 0.0f : scale;"),
            Mistake("state of the next head", r"if \(final_state\)",
                    "if (final_state && B > 16 && head == B * H - 1) return; if (final_state)"),
        ),
    ),
    Family(
        "linear_attention", "backward", "naive", "B=2,H=2,T=40,E=8,M=8,dtype=fp32",
        (
            Mistake("stride of another input", r"query\[t \* q_stride_T\]", "query[t * "
                                                                            "gout_stride_T]"),
            Mistake("batch stride of another input", r"key = k \+ b \* k_stride_B",
                    "key = k + b * gout_stride_B"),
            Mistake("exact zeros", r"return kgen::to_float\(gradient\[t \* gout_stride_T\]\)",
                    "if (gradient[t * gout_stride_T] == 0.0f) return kgen::infinity() * 0.0f;"
                    " return kgen::to_float(gradient[t * gout_stride_T])"),
            Mistake("keys of 1e3", r"return kgen::to_float\(key\[t \* k_stride_T\]\);",
                    "return kgen::min(kgen::to_float(key[t * k_stride_T]), 1e3f);"),
        ),
    ),
    Family(
        "wkv4", "forward", "naive",
        "B=2,T=40,C=7,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("stride of another input", r"v\[t \* v_stride_T\]", "v[t * k_stride_T]"),
            Mistake("values above 6e4", r", v_t = (kgen::to_float[^;]*);",
                    r", v_t = kgen::min(\1, 6e4f);"),
            Mistake("channels a multiple of 128", r"if \(column >= B \* C\) return;",
                    "if (column >= B * C || (C % 128 == 0 && column % C == C - 1)) return;"),
            Mistake("final state of another row", r"store_state\(final_state, column, state\)",
                    "store_state(final_state, B > 64 ? column % C + (B - 1 - column / C) * C : "
                    "column,"
                    " state)"),
            Mistake("steps beyond 512", r"kgen::wkv4::step\(state, decay, k_t, v_t\);",
                    "if (t <= 512) kgen::wkv4::step(state, decay, k_t, v_t);"),
        ),
    ),
    Family(
        "wkv4", "backward", "naive",
        "B=2,T=40,C=7,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("stride of another input", r"k\[b \* k_stride_B \+ t \* k_stride_T",
                    "k[b * k_stride_B + t * v_stride_T"),
            Mistake("gy above 6e4", r"kgen::to_float\((gy\[[^;]*\])\) \* output",
                    r"kgen::min(kgen::to_float(\1), 6e4f) * output"),
        ),
    ),
    Family(
        "wkv5", "forward", "naive",
        "B=2,T=40,H=2,K=8,V=8,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("strides of another input", r"\{v, v_stride_B, v_stride_T, v_stride_H\}",
                    "{v, k_stride_B, k_stride_T, k_stride_H}"),
            Mistake("NaN of the bonus", r"const float bonus = (kgen::wkv::bonus_of[^;]*);",
                    r"float bonus = \1; if (bonus != bonus) bonus = 0.0f;"),
            Mistake("a state above 6e4", _STATE_IS_INITIAL,
                    r"initial_state ? kgen::min(initial_state[first + \1 * \2], 6e4f) : 0.0f"),
            Mistake("a negative scale", r"scale \* kgen::fma\(bonus", "kgen::abs(scale) * "
                                                                      "kgen::fma(bonus"),
            Mistake("keys above 100", r"\[&\]\(i64 t\) \{ return v_h\(t, m\); \}",
                    "[&](i64 t) { return k_h(t, 0) > 100.0f ? 0.0f : v_h(t, m); }"),
        ),
    ),
    Family(
        "wkv5", "backward", "naive", "B=2,T=40,H=2,K=8,V=8,dtype=fp32,initial_state_dtype=fp32",
        (
            Mistake("strides of another input", r"\{r, r_stride_B, r_stride_T, r_stride_H\}",
                    "{r, k_stride_B, k_stride_T, k_stride_H}"),
            Mistake("NaN of a state", r"initial_state \? (initial_state\[[^;]*\]) : 0\.0f",
                    r"initial_state && \1 == \1 ? \1 : 0.0f"),
        ),
    ),
    Family(
        "wkv6", "forward", "naive",
        "B=1,N=4,T=60,H=2,K=8,V=8,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32,"
        "cu_seqlens_dtype=int32",
        (
            Mistake("state of an empty sequence", r"if \(final_state\)",
                    "if (final_state && span.steps > 0)"),
            Mistake("final state of the next sequence", r"if \(final_state\)",
                    "if (final_state && N > 2 && head / H == 1 && span.steps == 0) return;"
                    " if (final_state)"),
            Mistake("a single sequence", r"initial_state \? initial_state\[first",
                    "initial_state && N > 1 ? initial_state[first"),
            Mistake("a sequence of one step", r"y_h\.at\(t\)\[m\] = kgen::from_float<Value>\(scale",
                    "y_h.at(t)[m] = kgen::from_float<Value>((span.steps == 1 ? 0.0f : scale)"),
            Mistake("sequences beyond 64", r"if \(column >= N \* H \* V\) return;",
                    "if (column >= kgen::min(N, i64{64}) * H * V) return;"),
            Mistake("a sequence of whole tiles", r"y_h\.at\(t\)\[m\] = "
                                                 r"kgen::from_float<Value>\(scale",
                    "y_h.at(t)[m] = kgen::from_float<Value>((span.steps > 64 && span.steps % 64 "
                    "== 0 ? 0.0f : scale)"),
            Mistake("a later sequence at a tile", r"y_h\.at\(t\)\[m\] = "
                                                  r"kgen::from_float<Value>\(scale",
                    "y_h.at(t)[m] = kgen::from_float<Value>((span.first > 0 && span.first % 16 == 0"
                    " ? 0.0f : scale)"),
            Mistake("an empty first sequence", r"if \(final_state\)",
                    "if (final_state && !(span.steps == 0 && head / H == 0))"),
            Mistake("an empty last sequence", r"if \(final_state\)",
                    "if (final_state && !(span.steps == 0 && head / H == N - 1))"),
            Mistake("a sequence that has all steps", r"y_h\.at\(t\)\[m\] = "
                                                     r"kgen::from_float<Value>\(scale",
                    "y_h.at(t)[m] = kgen::from_float<Value>((N > 1 && span.steps == T ? 0.0f : "
                    "scale)"),
        ),
    ),
    Family(
        "wkv6", "backward", "naive",
        "B=1,N=4,T=60,H=2,K=8,V=8,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32,"
        "cu_seqlens_dtype=int64",
        (
            Mistake("gradient of the last state", r"gfinal_state \? (gfinal_state\[[^;]*\]) : "
                                                  r"0\.0f",
                    r"gfinal_state && span.steps > 0 ? \1 : 0.0f"),
            Mistake("large gradient of the state", r"gfinal_state \? (gfinal_state\[[^;]*\]) : "
                                                   r"0\.0f",
                    r"gfinal_state ? kgen::min(\1, 1e4f) : 0.0f"),
            Mistake("NaN of the bonus", r"const float bonus = kgen::to_float\(u\[h \* K \+ "
                                        r"key\]\);",
                    "const float bonus = u[h * K + key] == u[h * K + key] ? u[h * K + key] : "
                    "0.0f;"),
        ),
    ),
    Family(
        "wkv7", "forward", "naive",
        "B=2,T=40,H=2,K=8,V=8,dtype=fp32,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("strides of another input", r"\{b, b_stride_B, b_stride_T, b_stride_H\}",
                    "{b, a_stride_B, a_stride_T, a_stride_H}"),
            Mistake("NaN of a transition", r"const float sa = state\.read\(a_h\.at\(t\)\);",
                    "float sa = state.read(a_h.at(t)); if (sa != sa && state.read(r_h.at(t)) =="
                    " state.read(r_h.at(t))) sa = 0.0f;"),
            Mistake("values above 6e4", r"k_h\.at\(t\), v_h\(t, m\)\)",
                    "k_h.at(t), kgen::min(v_h(t, m), 6e4f))"),
            Mistake("a key of zeros", r"state\.update<kForm>",
                    "if (k_h(t, 0) != 0.0f || b_h(t, 0) == 0.0f) state.update<kForm>"),
            Mistake("a negative scale", r"\(scale \* state", "(kgen::abs(scale) * state"),
        ),
    ),
    Family(
        "wkv7", "backward", "naive", "B=2,T=40,H=2,K=8,V=8,dtype=fp32,initial_state_dtype=fp32",
        (
            Mistake("strides of another input", r"k_h = Rows<const Value>\{k, k_stride_B, "
                                                r"k_stride_T, k_stride_H\}",
                    "k_h = Rows<const Value>{k, r_stride_B, r_stride_T, r_stride_H}"),
            Mistake("a state above 6e4", r"initial_state \? (initial_state\[[^;]*\]) : 0\.0f",
                    r"initial_state ? kgen::min(\1, 6e4f) : 0.0f"),
        ),
    ),
    Family(
        "wkv6_decode", "forward", "naive",
"B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int32",
        (
            Mistake("a slot above 40", r"if \(!slot\.used\)", "if (!slot.used || slot.place > 40)"),
            Mistake("a state above 6e4", r"const float bonus =",
                    "*states.at(0, m) = kgen::min(*states.at(0, m), 6e4f); const float bonus ="),
            Mistake("the other slot", r"const auto r_h = r\.head",
                    "if (slot.place + 1 < S && n == B - 1 && T == 2)"
                    " *pool.head(slot.place + 1, h).at(0, m) *= 1.0f + 1e-6f;"
                    " const auto r_h = r.head"),
            Mistake("last slot of the pool", r"if \(!slot\.used\)",
                    "if (!slot.used || (slot.place == S - 1 && S == 1))"),
            Mistake("zero of a skipped sequence", r"kgen::from_float<Value>\(slot\.y\)",
                    "kgen::from_float<Value>(slot.y == 0.0f && T > 2 ? y_h.at(t)[m] : slot.y)"),
        ),
    ),
    Family(
        "wkv7_decode", "forward", "naive",
"B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int32",
        (
            Mistake("strides of another input", r"\{a, a_stride_B, a_stride_T, a_stride_H\}",
                    "{a, b_stride_B, b_stride_T, b_stride_H}"),
            Mistake("a negative scale", r"\(scale \* state", "(kgen::abs(scale) * state"),
        ),
    ),
    Family(
        "wkv5_decode", "forward", "warp_state", "B=3,S=5,T=3,H=2,K=9,V=5,dtype=bf16",
        (
            Mistake("states of many sequences", r"state\.store\(states\);",
                    "if (B <= 60) state.store(states);"),
            Mistake("no step", r"if \(T == 0\) return;",
                    "if (T == 0) { state.load(pool.head(slot.place, h)); }"),
        ),
        {"split": 4},
    ),
)  # fmt: skip



def _with_planted() -> tuple[Family, ...]:
    """Each kernel with the mistakes of all files, so that each kernel is certified once."""
    found: dict[tuple[str, str], Family] = {(f.name, f.dims): f for f in _HIDDEN}
    for planted in (*PLANTED, *RARE, *LAID, *SHAPED, *LONE, *UNLISTED, *BLIND, *UNTESTED,
                    *UNTESTED_IN_HEADERS, *JOINT):
        known = found.setdefault((planted.name, planted.dims), replace(planted, mistakes=()))
        both = replace(known, mistakes=(*known.mistakes, *planted.mistakes))
        found[planted.name, planted.dims] = both
    return tuple(found.values())


HIDDEN = (*_with_planted(), *EARLY)

_OTHERS_IN_CI = (
    PLANTED_IN_CI | RARE_IN_CI | LAID_IN_CI | EARLY_IN_CI | SHAPED_IN_CI | LONE_IN_CI
    | UNLISTED_IN_CI
    | BLIND_IN_CI
    | UNTESTED_IN_CI
    | UNTESTED_IN_HEADERS_IN_CI
    | JOINT_IN_CI
)
IN_CI = _OTHERS_IN_CI | frozenset({
    "rmsnorm-forward-naive-stride of another input",
    "rmsnorm-forward-naive-an address of 8 bytes",
    "rmsnorm-forward-naive-rows a multiple of 128",
    "rmsnorm-forward-naive-scalar for another",
    "rmsnorm-forward-naive-input written and restored",
    "rmsnorm-forward-naive-skips what is there",
    "rmsnorm-forward-naive-rounding toward zero",
    "rmsnorm-backward-naive-scale of an earlier block",
    "rmsnorm-backward-naive-NaN of a gradient",
    "timex-forward-naive-an exact zero",
    "timex-backward-naive-gradient of many rows",
    "linear_attention-forward-naive-a negative scale",
    "linear_attention-forward-naive-steps beyond 530",
    "linear_attention-backward-naive-keys of 1e3",
    "wkv4-forward-naive-final state of another row",
    "wkv4-backward-naive-gy above 6e4",
    "wkv5-forward-naive-NaN of the bonus",
    "wkv5-backward-naive-strides of another input",
    "wkv6-forward-naive-a later sequence at a tile",
    "wkv6-backward-naive-large gradient of the state",
    "wkv7-forward-naive-a key of zeros",
    "wkv7-backward-naive-a state above 6e4",
    "wkv6_decode-forward-naive-the other slot",
    "wkv7_decode-forward-naive-strides of another input",
    "wkv5_decode-forward-warp_state-no step",
})
"""One mistake of each kind; the others are marked slow."""
