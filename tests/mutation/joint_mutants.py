"""Damage that shows only where two kinds of special values meet, or with large weights.

A kernel may compute a chunk with NaN step by step, and that code met ordinary decays only. Weights
were ordinary ones, also where the outputs are not linear in them. The verifier certified these
kernels until it had the sets `nan with CASE` and `large weights`.
"""

from __future__ import annotations

from family_mutants import Family, Mistake

_RAW = "dtype=bf16,w_dtype=bf16,decay_form=raw"

JOINT = (
    Family(
        "wkv4", "backward", "anchored", "B=2,T=90,C=12,dtype=fp32",
        (Mistake("no limit of the bonus", r"kMostBonusLog2 = 30\.0f;",
                 "kMostBonusLog2 = 1e30f;"),),
        {"splits": 1, "segments": 4, "steps": 8},
    ),
    Family(
        "wkv5", "backward", "chunk_halving", f"B=1,T=45,H=2,K=32,V=16,{_RAW}",
        (Mistake("the slope of a decay of 0, step by step",
                 r"by_w \*= decay_slope<Config::kForm>\(w_at\(t, key\), decay\(t, key\)\);",
                 "by_w *= -exp(w_at(t, key)) * decay(t, key);"),),
    ),
    Family(
        "wkv6", "backward", "chunk_halving", f"B=1,T=45,H=1,K=16,V=16,{_RAW}",
        (
            Mistake("the slope of a decay of 0, step by step",
                    r"by_w \*= decay_slope<Config::kForm>\(w_at\(t, key\), decay\(t, key\)\);",
                    "by_w *= -exp(w_at(t, key)) * decay(t, key);"),
        ),
    ),
    Family(
        "wkv7", "backward", "warp_specialized", f"B=1,T=45,H=1,K=16,V=16,{_RAW}",
        (Mistake("the slope of a decay of 0, step by step",
                 r"by_w \* decay_slope<kForm>\(at\(w, t, key\), decay\(t, key\)\)",
                 "by_w * -exp(at(w, t, key)) * decay(t, key)"),),
    ),
)  # fmt: skip

JOINT_IN_CI = frozenset({
    "wkv4-backward-anchored-no limit of the bonus",
    "wkv6-backward-chunk_halving-the slope of a decay of 0, step by step",
})
"""The others are marked slow."""
