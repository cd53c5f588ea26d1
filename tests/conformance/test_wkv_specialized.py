"""warp_specialized of wkv5 and wkv6 with several producers and consumers, all forms of the decay.

`test_host.py` has one warp of each role: there one producer makes every chunk, in one part.
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
# Operator, problem; consumers and producers; stages; elements per copy.
CASES = (
    ("wkv6", "B=1,H=2,T=69,K=64,V=40,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 4), 4, 8),
    # Rows of 192 elements, which do not begin at powers of two.
    ("wkv6", "B=1,H=1,T=37,K=144,V=16,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 4), 2, 8),
    ("wkv6", f"B=1,H=1,T=37,K=128,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,{BEFORE}", (1, 4),
     2, 8),
    ("wkv6", f"B=1,N=4,H=1,T=90,K=48,V=32,dtype=bf16,decay_form=raw,{BOTH}", (2, 2), 4, 8),
    ("wkv5", "B=1,H=1,T=37,K=192,V=16,dtype=bf16,decay_form=raw", (1, 2), 2, 8),
    ("wkv6", "B=2,H=1,T=35,K=20,V=18,dtype=bf16,u_dtype=bf16,decay_form=log", (2, 4), 2, 2),
    ("wkv6", "B=1,H=1,T=33,K=24,V=16,dtype=bf16,decay_form=decay", (1, 2), 4, 4),
    ("wkv6", "B=1,H=1,T=33,K=7,V=5,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 8), 2, 1),
    ("wkv6", "B=2,H=1,T=1,K=16,V=16,dtype=bf16,decay_form=raw", (1, 2), 2, 8),
    ("wkv5", "B=1,H=2,T=69,K=64,V=32,dtype=bf16,decay_form=log", (2, 4), 4, 8),
    ("wkv5", f"B=1,N=3,H=2,T=90,K=80,V=16,dtype=bf16,decay_form=raw,{BOTH}", (1, 2), 2, 8),
    ("wkv5", "B=1,H=2,T=40,K=20,V=18,dtype=bf16,u_dtype=bf16,decay_form=raw", (2, 2), 2, 2),
    # The state of the step-by-step path shares memory with the copies, of which copies of zeros are
    # still in flight at the end.
    ("wkv6", "B=1,H=1,T=37,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=log", (4, 1), 4, 8),
)  # fmt: skip

# Also with the parts of producers unrolled, and for wkv5 with a table of powers: the last pair is
# (fixed_parts, powers).
LEAN = (
    ("wkv6", "B=1,H=2,T=69,K=64,V=40,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 4), 4, 8, (1, 0)),
    ("wkv6", f"B=1,N=4,H=1,T=90,K=48,V=32,dtype=bf16,decay_form=raw,{BOTH}", (2, 2), 2, 8, (1, 0)),
    ("wkv6", "B=2,H=1,T=35,K=20,V=18,dtype=bf16,u_dtype=bf16,decay_form=log", (2, 4), 2, 2,
     (1, 0)),
    ("wkv5", "B=1,H=1,T=37,K=192,V=16,dtype=bf16,decay_form=raw", (1, 2), 2, 8, (1, 1)),
    ("wkv5", "B=1,H=2,T=69,K=64,V=32,dtype=bf16,decay_form=log", (2, 4), 4, 8, (1, 1)),
    ("wkv5", f"B=1,N=3,H=2,T=90,K=80,V=16,dtype=bf16,decay_form=raw,{BOTH}", (1, 2), 2, 8, (0, 1)),
    ("wkv5", "B=1,H=2,T=40,K=20,V=18,dtype=bf16,u_dtype=bf16,decay_form=raw", (2, 2), 2, 2, (1, 1)),
    ("wkv5", "B=1,H=1,T=33,K=16,V=16,dtype=bf16,decay_form=log", (1, 1), 2, 8, (0, 1)),
)  # fmt: skip

# Two terms of rows R: consumers and producers; fixed_parts and powers.
TERMS = (
    ("wkv6", f"B=1,N=4,H=1,T=90,K=48,V=32,dtype=bf16,decay_form=raw,{BOTH}", (2, 2), (1, 0)),
    ("wkv6", "B=1,H=1,T=37,K=144,V=16,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 4), (0, 0)),
    ("wkv5", "B=1,H=2,T=69,K=64,V=32,dtype=bf16,decay_form=log", (2, 4), (1, 1)),
)  # fmt: skip

# Copies of whole rows: consumers and producers; stages; fixed_parts and powers.
ROWS = (
    ("wkv6", "B=1,H=2,T=69,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=raw", (4, 4), 4, (1, 0)),
    ("wkv6", "B=1,H=2,T=69,K=64,V=40,dtype=bf16,decay_form=log", (4, 4), 2, (0, 0)),
    ("wkv6", f"B=1,H=1,T=37,K=128,V=16,dtype=bf16,decay_form=raw,{BEFORE}", (1, 4), 2, (1, 0)),
    ("wkv6", f"B=1,N=4,H=1,T=90,K=48,V=32,dtype=bf16,decay_form=raw,{BOTH}", (2, 2), 4, (0, 0)),
    ("wkv6", "B=2,H=1,T=35,K=24,V=88,dtype=bf16,w_dtype=bf16,decay_form=log", (8, 2), 2, (1, 0)),
    ("wkv6", "B=1,H=1,T=33,K=8,V=24,dtype=bf16,decay_form=decay", (1, 4), 2, (0, 0)),
    ("wkv6", "B=2,H=1,T=1,K=16,V=16,dtype=bf16,decay_form=raw", (1, 2), 2, (1, 0)),
    ("wkv5", "B=1,H=2,T=69,K=64,V=32,dtype=bf16,decay_form=log", (2, 4), 4, (1, 1)),
    ("wkv5", f"B=1,N=3,H=2,T=90,K=80,V=16,dtype=bf16,decay_form=raw,{BOTH}", (1, 2), 2, (0, 0)),
    ("wkv6", "B=1,H=1,T=37,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=log", (4, 1), 4, (0, 0)),
)  # fmt: skip


def demand(
    operator: str, text: str, warps: tuple[int, int], stages: int, vec: int, **more: Value
) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant("forward", "warp_specialized")
    problem = parse_problem(text, entry.operator.signature)
    values: dict[str, Value] = {"stages": stages, "vec": vec, "min_blocks": 1, **more}
    values |= dict(zip(("warps", "row_warps"), warps, strict=True))
    demand_verified(entry, variant, problem, Config.of(variant.name, values))


@pytest.mark.parametrize(("operator", "text", "warps", "stages", "vec", "lean"), one_of(3, LEAN))
def test_lean_producers(
    operator: str, text: str, warps: tuple[int, int], stages: int, vec: int, lean: tuple[int, int]
) -> None:
    more = {"fixed_parts": bool(lean[0]), "powers": bool(lean[1])}
    demand(operator, text, warps, stages, vec, **more)


@pytest.mark.parametrize(("operator", "text", "warps", "lean"), one_of(2, TERMS))
def test_two_terms(operator: str, text: str, warps: tuple[int, int], lean: tuple[int, int]) -> None:
    more = {"fixed_parts": bool(lean[0]), "powers": bool(lean[1])}
    demand(operator, text, warps, 2, 8, r_terms=2, **more)


@pytest.mark.parametrize(("operator", "text", "warps", "stages", "lean"), one_of(3, ROWS))
def test_row_copies(
    operator: str, text: str, warps: tuple[int, int], stages: int, lean: tuple[int, int]
) -> None:
    more = {"fixed_parts": bool(lean[0]), "powers": bool(lean[1])}
    demand(operator, text, warps, stages, 8, row_copies=True, **more)


@pytest.mark.parametrize(("operator", "text", "warps", "stages", "vec"), one_of(3, CASES))
def test_several_warps(
    operator: str, text: str, warps: tuple[int, int], stages: int, vec: int
) -> None:
    demand(operator, text, warps, stages, vec, fixed_parts=False, powers=False)
