"""wkv5's and wkv6's backward pass by halving: w in bf16, ragged extents, groups of warps, segments."""

from __future__ import annotations

import pytest
from test_host import demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem

FINAL = "final_state_dtype=fp32"
PACKED = "cu_seqlens_dtype=int32"
# Groups of warps; bytes per copy; terms of the state's gradient.
CASES = (
    ("wkv6", "B=1,H=2,T=150,K=64,V=64,decay_form=raw", 2, 16, 1),
    ("wkv6", f"B=1,H=1,T=77,K=64,V=48,decay_form=log,{FINAL}", 1, 16, 2),
    ("wkv6", f"B=1,N=5,H=2,T=170,K=32,V=64,decay_form=log,{PACKED},{FINAL}", 2, 16, 1),
    ("wkv6", "B=2,H=1,T=33,K=20,V=18,decay_form=raw", 2, 4, 1),
    ("wkv6", "B=1,H=1,T=40,K=7,V=5,decay_form=log,u_dtype=fp32", 2, 2, 1),
    ("wkv6", "B=1,H=1,T=20,K=128,V=16,decay_form=log", 1, 16, 1),
    ("wkv6", "B=1,H=1,T=50,K=16,V=128,decay_form=raw", 2, 8, 2),
    ("wkv5", f"B=2,H=1,T=100,K=64,V=64,decay_form=raw,{FINAL}", 2, 16, 1),
    ("wkv5", f"B=1,N=4,H=1,T=90,K=48,V=24,decay_form=log,{PACKED}", 1, 16, 1),
)  # fmt: skip
# Segments of T as well. Some have a part of a chunk or no step, also where sequences are packed.
SEGMENTS = (
    ("wkv6", f"B=1,H=2,T=250,K=64,V=40,decay_form=raw,{FINAL}", 2, 16, 1, 3),
    ("wkv6", "B=1,H=1,T=264,K=32,V=80,decay_form=log", 1, 8, 2, 5),
    ("wkv6", "B=2,H=1,T=97,K=20,V=18,decay_form=raw", 2, 4, 1, 3),
    ("wkv6", f"B=1,H=1,T=100,K=7,V=5,decay_form=log,{FINAL}", 1, 2, 1, 6),
    ("wkv6", f"B=1,N=3,H=2,T=170,K=48,V=32,decay_form=log,{PACKED},{FINAL}", 2, 16, 1, 3),
    ("wkv6", "B=1,H=1,T=40,K=128,V=16,decay_form=raw", 1, 16, 1, 4),
    ("wkv5", f"B=1,H=2,T=250,K=40,V=72,decay_form=raw,{FINAL}", 2, 16, 2, 3),
    ("wkv5", f"B=1,N=3,H=2,T=170,K=16,V=32,decay_form=log,{PACKED}", 1, 16, 1, 4),
    ("wkv5", "B=2,H=1,T=70,K=18,V=128,decay_form=log", 1, 4, 1, 2),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "text", "groups", "copy_bytes", "terms"), CASES)
def test_backward_by_halves(
    operator: str, text: str, groups: int, copy_bytes: int, terms: int
) -> None:
    demand("chunk_halving", operator, text, groups, copy_bytes, terms)


@pytest.mark.parametrize(
    ("operator", "text", "groups", "copy_bytes", "terms", "segments"), SEGMENTS
)
def test_segments(
    operator: str, text: str, groups: int, copy_bytes: int, terms: int, segments: int
) -> None:
    demand("chunk_halving_segments", operator, text, groups, copy_bytes, terms, segments=segments)


def demand(
    name: str, operator: str, text: str, groups: int, copy_bytes: int, terms: int, **more: int
) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant("backward", name)
    problem = parse_problem(f"{text},dtype=bf16,w_dtype=bf16", entry.operator.signature)
    config = variant.config({
        "groups": groups, "stages": 2, "copy_bytes": copy_bytes, "min_blocks": 1,
        "gradient_terms": terms, **more,
    })  # fmt: skip
    demand_verified(entry, variant, problem, config)
