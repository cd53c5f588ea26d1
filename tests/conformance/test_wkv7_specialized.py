"""wkv7's warp_specialized with several producers and consumers, for all forms of the decay.

`test_host.py` has one warp of each role, which has all keys of a head. Nothing is summed over warps
there, and one warp writes all fragments of the scores.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, SHUFFLED, run_configs
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Fate

BEFORE, PACKED = "initial_state_dtype=fp32", "cu_seqlens_dtype=int64"
AFTER, BF16 = "final_state_dtype=fp32", "dtype=bf16,w_dtype=bf16"
# Problem; consumers and producers; stages; elements per copy.
CASES = (
    ("B=1,H=2,T=37,K=64,V=40,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 4), 2, 8),
    (f"B=1,H=1,T=33,K=128,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,{BEFORE}", (1, 4), 4, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,dtype=bf16,decay_form=raw,{BEFORE},{PACKED}", (2, 2), 4, 8),
    ("B=1,H=1,T=33,K=144,V=16,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 4), 2, 8),
    ("B=2,H=1,T=19,K=20,V=18,dtype=bf16,decay_form=log", (2, 4), 2, 2),
    ("B=1,H=2,T=40,K=64,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp", (1, 4), 2, 8),
    ("B=1,H=1,T=18,K=24,V=16,dtype=bf16,decay_form=clamp", (1, 2), 4, 4),
    ("B=1,H=1,T=17,K=7,V=5,dtype=bf16,w_dtype=bf16,decay_form=log", (1, 8), 2, 1),
    ("B=2,H=1,T=1,K=16,V=16,dtype=bf16,decay_form=raw", (1, 2), 2, 8),
)  # fmt: skip


BACKWARD = (
    (f"B=1,H=2,T=37,K=64,V=40,{BF16},decay_form=log", (1, 4), 2, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,{BF16},decay_form=raw,{AFTER},{PACKED}", (2, 2), 4, 8),
    (f"B=1,N=3,H=2,T=50,K=16,V=20,{BF16},decay_form=clamp,{AFTER},{PACKED}", (2, 1), 2, 4),
    (f"B=1,H=1,T=33,K=128,V=16,{BF16},decay_form=raw,{AFTER}", (1, 4), 4, 8),
    (f"B=2,H=1,T=19,K=20,V=18,{BF16},decay_form=log", (2, 4), 2, 2),
    (f"B=1,H=2,T=40,K=64,V=16,{BF16},decay_form=clamp,{AFTER}", (1, 4), 2, 8),
    (f"B=1,H=1,T=17,K=7,V=5,{BF16},decay_form=log,{AFTER}", (1, 8), 2, 1),
    (f"B=2,H=1,T=1,K=16,V=16,{BF16},decay_form=raw,{AFTER}", (1, 2), 2, 8),
)  # fmt: skip
# States in bf16 and levels in a loop: stores of four value features and of single ones; a partial
# tile of keys.
ROUNDED = (
    (f"B=1,H=2,T=37,K=64,V=64,{BF16},decay_form=clamp,{AFTER}", (2, 4), 2, 8),
    (f"B=1,N=4,H=1,T=70,K=72,V=68,{BF16},decay_form=raw,{AFTER},{PACKED}", (2, 2), 2, 4),
    (f"B=2,H=1,T=19,K=70,V=66,{BF16},decay_form=log", (2, 4), 2, 2),
)  # fmt: skip

# Rows with quotients of clamped decays: producers with one tile of keys at a time, with two tiles,
# with a tile beyond the keys, and without a tile; a producer with all matrices; w in fp32.
QUOTIENTS = (
    ("B=1,H=2,T=40,K=64,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp", (1, 4), 2, 8),
    ("B=1,H=1,T=33,K=144,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp", (1, 4), 2, 8),
    (f"B=1,H=1,T=33,K=128,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp,{BEFORE}", (1, 4), 4, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,dtype=bf16,decay_form=clamp,{BEFORE},{PACKED}", (2, 2), 4, 8),
    ("B=1,H=1,T=21,K=64,V=16,dtype=bf16,decay_form=clamp", (1, 2), 2, 8),
    ("B=2,H=1,T=19,K=68,V=18,dtype=bf16,w_dtype=bf16,decay_form=clamp", (2, 1), 2, 2),
    ("B=1,H=1,T=17,K=7,V=5,dtype=bf16,w_dtype=bf16,decay_form=clamp", (1, 8), 2, 1),
    ("B=2,H=1,T=1,K=16,V=16,dtype=bf16,decay_form=clamp", (1, 2), 2, 8),
)  # fmt: skip
QUOTIENTS_BACKWARD = (
    (f"B=1,H=2,T=40,K=64,V=40,{BF16},decay_form=clamp,{AFTER}", (1, 4), 2, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,{BF16},decay_form=clamp,{AFTER},{PACKED}", (2, 2), 4, 8),
    (f"B=1,H=1,T=33,K=128,V=16,{BF16},decay_form=clamp", (1, 4), 2, 8),
    (f"B=2,H=1,T=19,K=20,V=18,{BF16},decay_form=clamp", (2, 1), 2, 2),
    (f"B=1,H=1,T=17,K=7,V=5,{BF16},decay_form=clamp,{AFTER}", (1, 8), 2, 1),
)  # fmt: skip


def certify(
    pass_name: str, text: str, warps: tuple[int, int], values: dict[str, int]
) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant(pass_name, "warp_specialized")
    problem = parse_problem(text, entry.operator.signature)
    values |= dict(zip(("warps", "row_warps"), warps, strict=True)) | {"min_blocks": 1}
    config = Config.of(variant.name, values)
    for _, _, outcome in run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK, SHUFFLED)
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@pytest.mark.parametrize(("text", "warps", "stages", "vec"), one_of(2, CASES))
def test_several_warps(text: str, warps: tuple[int, int], stages: int, vec: int) -> None:
    certify("forward", text, warps, {"stages": stages, "vec": vec})


SECOND = {"chunk_warps": 2, "chunk_blocks": 1}


@pytest.mark.parametrize(("text", "warps", "stages", "vec"), one_of(2, BACKWARD))
def test_several_warps_backward(text: str, warps: tuple[int, int], stages: int, vec: int) -> None:
    certify("backward", text, warps, {"stages": stages, "vec": vec} | SECOND)


@pytest.mark.parametrize(("text", "warps", "stages", "vec"), one_of(2, ROUNDED))
def test_states_in_bf16(text: str, warps: tuple[int, int], stages: int, vec: int) -> None:
    values = {"stages": stages, "vec": vec, "state_bytes": 2, "level_loop": 1}
    certify("backward", text, warps, values | SECOND)


@pytest.mark.parametrize(("text", "warps", "stages", "vec"), one_of(3, QUOTIENTS))
def test_quotients(text: str, warps: tuple[int, int], stages: int, vec: int) -> None:
    certify("forward", text, warps, {"stages": stages, "vec": vec, "quotients": 1})


@pytest.mark.parametrize(("text", "warps", "stages", "vec"), one_of(2, QUOTIENTS_BACKWARD))
def test_quotients_backward(text: str, warps: tuple[int, int], stages: int, vec: int) -> None:
    values = {"stages": stages, "vec": vec, "level_loop": 0, "quotients": 1}
    certify("backward", text, warps, values | SECOND)
