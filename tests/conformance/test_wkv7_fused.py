"""wkv7's fused backward loop over several chunks of 32 steps: ragged ends, packed, fewer features.

`test_host.py` has problems of one or two chunks and a few features of a head.
"""

from __future__ import annotations

import pytest
from test_host import demand_verified

from kgen.catalogue import open_catalogue, profile_named
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BEHIND, PACKED = "final_state_dtype=fp32", "cu_seqlens_dtype=int64"
BF16 = "dtype=bf16,w_dtype=bf16,decay_form=clamp"
# Elements per copy. T: whole chunks, and some with one step or all but one in the last chunk.
CASES = (
    (f"B=1,H=1,T=160,K=64,V=64,{BF16}", 8),  # all slots of rows are used again
    (f"B=1,H=2,T=97,K=64,V=64,{BF16},{BEHIND}", 8),
    (f"B=1,N=4,H=1,T=127,K=48,V=64,{BF16},{BEHIND},{PACKED}", 8),
    (f"B=1,N=3,H=1,T=70,K=64,V=20,{BF16},{PACKED}", 4),
    (f"B=2,H=1,T=31,K=22,V=18,{BF16}", 2),
    (f"B=1,H=1,T=66,K=57,V=9,{BF16},{BEHIND}", 1),
    (f"B=1,H=3,T=1,K=8,V=8,{BF16},{BEHIND}", 8),
)  # fmt: skip


# The same with the first kernel by warpgroups; T=33: a chunk of one step.
WARPGROUPS = (
    (f"B=1,H=1,T=129,K=64,V=64,{BF16}", 8),
    (f"B=1,N=3,H=1,T=70,K=64,V=20,{BF16},{PACKED}", 4),
    (f"B=2,H=1,T=33,K=22,V=18,{BF16},{BEHIND}", 2),
    (f"B=1,H=1,T=66,K=57,V=9,{BF16}", 1),
)  # fmt: skip
SLOW = WARPGROUPS[2:]


@pytest.mark.parametrize(
    ("text", "vec", "warpgroups"),
    [
        *((*case, 0) for case in CASES),
        *(pytest.param(*case, 1, marks=[pytest.mark.slow] if case in SLOW else [])
          for case in WARPGROUPS),
    ],
)
def test_chunks(text: str, vec: int, warpgroups: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "warpgroups_fused")
    problem = parse_problem(text, entry.operator.signature)
    warps = 4 if warpgroups else 1
    config = Config.of(variant.name, {
        "warps": warps, "row_warps": warps, "stages": 2, "vec": vec, "min_blocks": 1,
        "row_copies": 0, "consumer_scores": 0, "warpgroups": warpgroups,
    })  # fmt: skip
    demand_verified(entry, variant, problem, config, profile_named("h200"))
