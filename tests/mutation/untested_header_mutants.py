"""Damage under conditions that no input set meets, in the headers of kernels by chunks."""

from __future__ import annotations

from family_mutants import Family, Mistake

UNTESTED_IN_HEADERS = (
    Family(
        "linear_attention", "forward", "chunk_loop", "B=1,H=2,T=170,E=32,M=32,dtype=bf16",
        (Mistake("a grid beyond all sets", r"\bs \+ i <= t \?",
                 "s + i <= t && gridDim.x != 9001 ?"),),
        {"stages": 3},
    ),
    Family(
        "timex", "forward", "toeplitz_mma", "B=3,C=5,T=100,dtype=bf16",
        (Mistake("steps beyond all sets", r"(b >= \w+) \|\| t >= (\w+)(\) return;)",
                 r"\1 || t >= \2 || t == 70007\3"),),
        {"warps": 2},
    ),
    Family(
        "wkv4", "forward", "running_max",
        "B=1,T=90,C=13,dtype=fp32,initial_state_dtype=fp32",
        (Mistake("a certain key", r"m = larger\(kept, k\);",
                 "m = k == 0.3f ? kept : larger(kept, k);"),),
        {"splits": 2, "segments": 4, "steps": 8},
    ),
    Family(
        "wkv6", "forward", "warp_specialized", "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=log",
        (
            Mistake("a certain bonus", r"own_r\[x\] \* bonus\[x\]",
                    "own_r[x] * (bonus[x] == 0.3f ? 0.0f : bonus[x])"),
            Mistake("a certain decay", r"r\[1\]\[x\] \*= all\[0\]\[x\];",
                    "if (all[0][x] != 0.77f) r[1][x] *= all[0][x];"),
        ),
    ),
    Family(
        "wkv6", "backward", "chunk_loop", "B=1,T=170,H=1,K=32,V=32,dtype=bf16",
        (Mistake("a certain decay", r"\bbefore\.multiply\(d\[i\]\);",
                 "before.multiply(d[i] == 0.77f ? 1.0f : d[i]);"),),
        {"chunk": 32, "stages": 3},
    ),
    Family(
        "wkv7", "forward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=clamp",
        (Mistake("a certain decay",
                 r"(i < 4; \+\+i\)) state\[2 \* tile \+ n\]\[i\] \*= d\[i % 2\];",
                 r"\1 if (d[i % 2] != 0.77f) state[2 * tile + n][i] *= d[i % 2];"),),
    ),
    Family(
        "wkv7", "backward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (Mistake("a certain scale", r"through\[x\] \*= r_factor_;",
                 "if (r_factor_ != 0.3f) through[x] *= r_factor_;"),),
    ),
)  # fmt: skip

UNTESTED_IN_HEADERS_IN_CI = frozenset({
    "wkv4-forward-running_max-a certain key",
    "wkv6-forward-warp_specialized-a certain decay",
})
"""The others are marked slow."""
