"""wkv7's warp_specialized_tf32 with several producers and consumers, for all forms of the decay.

`test_host.py` has one warp of each role, which has all keys of a head. Nothing is summed over warps
there, and one warp writes all fragments of the scores.
"""

from __future__ import annotations

import pytest
from test_host import demand_verified
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
PACKED = "cu_seqlens_dtype=int64"
# Problem; consumers and producers; stages; elements per copy.
CASES = (
    (f"B=1,H=2,T=37,K=64,V=40,dtype=fp16,w_dtype=fp16,decay_form=log,{BEHIND}", (1, 4), 2, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,dtype=bf16,decay_form=raw,{BEFORE},{BEHIND},{PACKED}",
     (2, 2), 4, 8),
    (f"B=1,H=1,T=33,K=128,V=16,dtype=fp16,w_dtype=fp16,decay_form=raw,{BEFORE}", (1, 4), 2, 8),
    (f"B=2,H=1,T=19,K=20,V=18,dtype=bf16,decay_form=log,{BEHIND}", (2, 4), 2, 2),
    (f"B=1,H=2,T=40,K=64,V=16,dtype=fp16,w_dtype=fp16,decay_form=clamp,{BEFORE},{BEHIND}",
     (1, 4), 2, 8),
    ("B=1,H=1,T=45,K=64,V=32,dtype=bf16,w_dtype=bf16,decay_form=log", (2, 4), 2, 8),
    (f"B=1,N=4,H=1,T=70,K=64,V=64,dtype=fp16,decay_form=clamp,{BEFORE},{BEHIND},{PACKED}",
     (4, 4), 2, 8),
    (f"B=1,H=1,T=18,K=24,V=16,dtype=bf16,decay_form=clamp,{BEHIND}", (1, 2), 4, 4),
    ("B=1,H=1,T=17,K=7,V=5,dtype=fp16,w_dtype=fp16,decay_form=log", (1, 8), 2, 1),
    (f"B=2,H=1,T=1,K=16,V=16,dtype=bf16,decay_form=raw,{BEHIND}", (1, 2), 2, 8),
    # Inputs in fp32.
    (f"B=1,H=2,T=53,K=64,V=40,dtype=fp32,decay_form=log,{BEFORE},{BEHIND}", (2, 4), 2, 4),
    ("B=1,H=1,T=33,K=128,V=16,dtype=fp32,decay_form=clamp", (1, 4), 2, 4),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,dtype=fp32,decay_form=raw,{BEHIND},{PACKED}", (2, 2), 4, 4),
    (f"B=2,H=1,T=19,K=18,V=18,dtype=fp32,decay_form=log,{BEFORE}", (2, 4), 2, 2),
    (f"B=1,H=1,T=41,K=17,V=5,dtype=fp32,decay_form=clamp,{BEHIND}", (1, 8), 2, 1),
)  # fmt: skip


@pytest.mark.parametrize(("text", "warps", "stages", "vec"), one_of(2, CASES))
def test_several_warps(text: str, warps: tuple[int, int], stages: int, vec: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("forward", "warp_specialized_tf32")
    problem = parse_problem(text, entry.operator.signature)
    values = {"stages": stages, "vec": vec, "min_blocks": 1}
    values |= dict(zip(("warps", "row_warps"), warps, strict=True))
    config = Config.of(variant.name, values)
    demand_verified(entry, variant, problem, config)
