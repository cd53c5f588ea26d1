"""wkv7's backward kernels of rows on tensor cores: 16 bits, all decays, several warps."""

from __future__ import annotations

import pytest
from test_host import demand_verified
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
PACKED = "cu_seqlens_dtype=int64"
BF16, FP16 = "dtype=bf16,w_dtype=bf16", "dtype=fp16,w_dtype=fp16"
# Problem; warps of the second kernel; elements per copy.
CASES = (
    (f"B=1,H=2,T=37,K=64,V=40,{BF16},decay_form=log", 4, 8),
    (f"B=2,H=1,T=19,K=20,V=18,{BF16},decay_form=clamp", 2, 2),
    (f"B=1,H=1,T=33,K=20,V=128,{BF16},decay_form=raw,{STATES}", 1, 4),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,{BF16},decay_form=raw,{STATES},{PACKED}", 2, 8),
    (f"B=1,H=1,T=17,K=7,V=5,{BF16},decay_form=log", 1, 1),
    (f"B=1,H=1,T=20,K=128,V=16,{BF16},decay_form=clamp", 8, 8),
    # Three products of TF32 terms replace one fp32 product.
    (f"B=1,H=2,T=37,K=64,V=40,{FP16},decay_form=log", 4, 8),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,{FP16},decay_form=raw,{STATES},{PACKED}", 2, 8),
    (f"B=1,H=1,T=33,K=20,V=128,{FP16},decay_form=clamp,{STATES}", 1, 4),
    (f"B=2,H=1,T=19,K=18,V=18,{FP16},decay_form=clamp", 2, 2),
    (f"B=1,H=1,T=17,K=7,V=5,{FP16},decay_form=log", 1, 1),
)  # fmt: skip
# Chunks of 32 steps, with quotients of decays.
CLAMP = f"{BF16},decay_form=clamp"
QUOTIENT_CASES = (
    (f"B=1,H=2,T=101,K=64,V=40,{CLAMP}", 4, 8),
    (f"B=1,N=4,H=1,T=140,K=48,V=32,{CLAMP},{STATES},{PACKED}", 2, 8),
    (f"B=1,H=1,T=65,K=20,V=128,{CLAMP},{STATES}", 1, 4),
    (f"B=2,H=1,T=37,K=18,V=18,{CLAMP}", 2, 2),
    (f"B=1,H=1,T=49,K=128,V=80,{CLAMP}", 8, 8),
    (f"B=1,H=1,T=33,K=7,V=5,{CLAMP}", 1, 1),
    # Sequences of one step after initial states that are tiny relative to the step.
    (f"B=1,N=3,H=1,T=35,K=8,V=3,{CLAMP},initial_state_dtype=fp32,{PACKED}", 1, 1),
)
# Checkpoints of other first kernels, every 32 steps.
CHECKPOINTS: tuple[tuple[str, str, dict[str, int]], ...] = (
    ("warp_specialized", f"B=2,H=1,T=37,K=64,V=64,{CLAMP}", {"row_warps": 1, "state_bytes": 2}),
    (
        "warp_specialized", f"B=1,N=3,H=1,T=70,K=68,V=72,{CLAMP},final_state_dtype=fp32,{PACKED}",
        {"row_warps": 1, "state_bytes": 2, "vec": 4, "quotients": 1, "consumer_scores": 1},
    ),
    ("chunk_loop", f"B=1,N=3,H=1,T=90,K=16,V=16,{CLAMP},{STATES},{PACKED}", {}),
)
FIRST = {"split": 8, "tile": 1, "columns": 8, "tokens": 4, "stages": 2, "chunk_blocks": 1}


@pytest.mark.parametrize(
    ("text", "chunk_warps", "vec", "chunk"),
    [
        *one_of(3, [(*case, 16) for case in CASES]),
        *one_of(2, [(*case, 32) for case in QUOTIENT_CASES]),
    ],
)
def test_chunk_rows(text: str, chunk_warps: int, vec: int, chunk: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "chunk_rows")
    problem = parse_problem(text, entry.operator.signature)
    values = {"chunk_warps": chunk_warps, "vec": vec, "chunk": chunk}
    config = Config.of(variant.name, FIRST | values)
    demand_verified(entry, variant, problem, config)


@pytest.mark.parametrize(("name", "text", "more"), one_of(2, CHECKPOINTS))
def test_checkpoints_every_32_steps(name: str, text: str, more: dict[str, int]) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", name)
    problem = parse_problem(text, entry.operator.signature)
    values = {"warps": 1, "stages": 2, "vec": 8, "min_blocks": 1, "chunk_warps": 1}
    config = Config.of(variant.name, values | {"chunk_blocks": 1, "chunk": 32} | more)
    demand_verified(entry, variant, problem, config)
