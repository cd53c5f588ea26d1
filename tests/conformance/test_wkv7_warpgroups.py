"""wkv7's warpgroups over several chunks of 32 steps, ragged ends, packed sequences, fewer features.

They are also tested as the last kernel of `warp_specialized_segments`. `test_host.py` has problems
of one or two chunks and a few features of a head.
"""

from __future__ import annotations

import pytest
from test_host import demand_verified
from tiers import one_of

from kgen.catalogue import open_catalogue, profile_named
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BEFORE, PACKED = "initial_state_dtype=fp32", "cu_seqlens_dtype=int64"
BF16 = "dtype=bf16,w_dtype=bf16,decay_form=clamp"
WIDE = "dtype=bf16,w_dtype=fp32,decay_form=clamp"
# Problem; elements per copy. The last chunk is whole, or has one step, or lacks one step.
CASES = (
    (f"B=1,H=1,T=128,K=64,V=64,{BF16}", 8),  # all slots of rows are reused
    (f"B=1,H=2,T=97,K=64,V=40,{BF16},{BEFORE}", 8),
    (f"B=1,N=4,H=1,T=127,K=48,V=64,{BF16},{BEFORE},{PACKED}", 8),
    (f"B=1,N=3,H=1,T=70,K=64,V=20,{WIDE},{PACKED}", 4),
    (f"B=1,H=1,T=65,K=64,V=72,{WIDE},{BEFORE}", 8),  # two blocks of value features
    (f"B=2,H=1,T=31,K=22,V=18,{BF16}", 2),
    (f"B=1,H=1,T=66,K=57,V=5,{WIDE}", 1),
)  # fmt: skip


@pytest.mark.parametrize(("text", "vec"), one_of(2, CASES))
def test_chunks(text: str, vec: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("forward", "warpgroups")
    problem = parse_problem(text, entry.operator.signature)
    config = Config.of(variant.name, {"vec": vec, "min_blocks": 1})
    demand_verified(entry, variant, problem, config, profile_named("h200"))


# Problem; elements per copy; segments: whole ones, some that end within a chunk, and empty ones.
SEGMENTS = (
    (f"B=1,H=1,T=290,K=64,V=64,{BF16}", 8, 3),
    (f"B=1,N=3,H=1,T=129,K=48,V=64,{WIDE},{BEFORE},{PACKED}", 4, 4),
    (f"B=2,H=1,T=70,K=64,V=72,{BF16},{BEFORE}", 8, 3),
)


@pytest.mark.parametrize(("text", "vec", "segments"), one_of(2, SEGMENTS))
def test_segments(text: str, vec: int, segments: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("forward", "warp_specialized_segments")
    problem = parse_problem(text, entry.operator.signature)
    config = Config.of(variant.name, {
        "warps": 4, "row_warps": 4, "stages": 2, "vec": vec, "min_blocks": 1, "quotients": 1,
        "row_copies": 0, "segments": segments, "state_warps": 4, "state_blocks": 1, "warpgroups": 1,
    })  # fmt: skip
    demand_verified(entry, variant, problem, config, profile_named("h200"))
