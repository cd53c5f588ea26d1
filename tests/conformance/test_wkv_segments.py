"""warp_specialized_segments and warp_specialized_states of wkv5 and wkv6: several warps of each
role, ragged ends, packed ones.

`test_host.py` has one warp of each role, and short sequences with mostly empty segments.
"""

from __future__ import annotations

import pytest
from test_host import demand_verified
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Config, Value
from kgen.model.problem import parse_problem

BEFORE, PACKED = "initial_state_dtype=fp32", "cu_seqlens_dtype=int64"
BOTH = f"{BEFORE},{PACKED}"
# Operator, problem; segments; consumers and producers; stages of the last and of the first kernel;
# elements per copy.
CASES = (
    (f"wkv6 B=1,H=2,T=250,K=64,V=40,dtype=bf16,decay_form=log,{BEFORE}", 3, (1, 4), 4, 2, 8),
    ("wkv6 B=1,H=1,T=264,K=32,V=80,dtype=bf16,w_dtype=bf16,decay_form=raw", 5, (2, 2), 2, 4, 8),
    (f"wkv6 B=2,H=1,T=200,K=48,V=16,dtype=bf16,decay_form=raw,{BEFORE}", 4, (1, 2), 4, 2, 8),
    ("wkv6 B=1,H=2,T=97,K=20,V=18,dtype=bf16,decay_form=log", 3, (2, 4), 2, 4, 2),
    (f"wkv6 B=1,H=1,T=100,K=7,V=5,dtype=bf16,decay_form=decay,{BEFORE}", 6, (1, 1), 2, 2, 1),
    (f"wkv6 B=1,N=3,H=2,T=170,K=48,V=32,dtype=bf16,decay_form=log,{BOTH}", 3, (2, 2), 4, 4, 8),
    (f"wkv5 B=1,H=2,T=250,K=40,V=72,dtype=bf16,decay_form=log,{BEFORE}", 3, (1, 2), 2, 2, 8),
    (f"wkv5 B=1,N=3,H=2,T=170,K=16,V=32,dtype=bf16,decay_form=raw,{PACKED}", 4, (2, 2), 4, 4, 8),
)  # fmt: skip
LEAN = (
    ("wkv6 B=1,H=1,T=150,K=64,V=16,dtype=bf16,w_dtype=bf16,decay_form=log", 3, (1, 4), 4, 2, 8),
    ("wkv5 B=1,H=1,T=150,K=64,V=16,dtype=bf16,decay_form=log", 3, (1, 4), 4, 2, 8),
)
STATES = f"{BEFORE},final_state_dtype=fp32"
OF_STATES = (
    (f"wkv6 B=1,H=2,T=250,K=64,V=40,dtype=bf16,decay_form=log,{STATES}", 3, (1, 4), 4, 2, 8),
    (f"wkv6 B=2,H=1,T=200,K=48,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,{STATES}", 1, (1, 2),
     2, 4, 8),
    ("wkv6 B=1,H=1,T=97,K=20,V=18,dtype=bf16,decay_form=raw,final_state_dtype=fp32", 2, (2, 4), 2,
     4, 2),
    (f"wkv6 B=1,N=3,H=2,T=170,K=48,V=80,dtype=bf16,decay_form=log,{STATES},{PACKED}", 3, (2, 2), 4,
     4, 8),
    (f"wkv5 B=1,H=2,T=250,K=40,V=72,dtype=bf16,decay_form=log,{STATES}", 1, (1, 2), 2, 2, 8),
    (f"wkv5 B=1,N=3,H=2,T=170,K=16,V=32,dtype=bf16,decay_form=raw,{STATES},{PACKED}", 4, (2, 2), 4,
     4, 8),
)  # fmt: skip


def demand(
    text: str, segments: int, warps: tuple[int, int], stages: int, state_stages: int, vec: int,
    variant_name: str = "warp_specialized_segments", **more: bool,
) -> None:  # fmt: skip
    operator, _, fields = text.partition(" ")
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant("forward", variant_name)
    problem = parse_problem(fields, entry.operator.signature)
    values: dict[str, Value] = {"stages": stages, "vec": vec, "min_blocks": 1, **more}
    values |= {"segments": segments, "state_stages": state_stages}
    values |= dict(zip(("warps", "row_warps"), warps, strict=True))
    demand_verified(entry, variant, problem, Config.of(variant.name, values))


@pytest.mark.parametrize(
    ("text", "segments", "warps", "stages", "state_stages", "vec"), one_of(2, CASES)
)
def test_segments(
    text: str, segments: int, warps: tuple[int, int], stages: int, state_stages: int, vec: int
) -> None:
    demand(text, segments, warps, stages, state_stages, vec, fixed_parts=False, powers=False)


@pytest.mark.parametrize(("text", "segments", "warps", "stages", "state_stages", "vec"), LEAN)
def test_lean_producers(
    text: str, segments: int, warps: tuple[int, int], stages: int, state_stages: int, vec: int
) -> None:
    powers = text.startswith("wkv5")
    demand(text, segments, warps, stages, state_stages, vec, fixed_parts=True, powers=powers)


@pytest.mark.parametrize(
    ("text", "segments", "warps", "stages", "state_stages", "vec"),
    one_of(2, [CASES[5], CASES[0], CASES[7]]),
)
def test_row_copies(
    text: str, segments: int, warps: tuple[int, int], stages: int, state_stages: int, vec: int
) -> None:
    demand(text, segments, warps, stages, state_stages, vec, row_copies=True, fixed_parts=False)


@pytest.mark.parametrize(
    ("text", "segments", "warps", "stages", "state_stages", "vec"), OF_STATES
)
def test_final_states(
    text: str, segments: int, warps: tuple[int, int], stages: int, state_stages: int, vec: int
) -> None:
    demand(text, segments, warps, stages, state_stages, vec, "warp_specialized_states",
           fixed_parts=False, powers=False, row_copies=vec == 8)
