"""Kernels of wkv7 whose warps copy whole rows for each other."""

from __future__ import annotations

import pytest
from test_host import demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BF16, FP32, FP16 = "dtype=bf16,w_dtype=bf16", "dtype=bf16,w_dtype=fp32", "dtype=fp16,w_dtype=fp16"
PACKED = "cu_seqlens_dtype=int64"
ROWS = {"chunk_warps": 1, "chunk_blocks": 1}
SEGMENTS = {"segments": 2, "state_warps": 2}
# Pass, variant, problem, further parameters; consumers, producers, stages, elements per copy. A
# producer has one tile of keys, two, or none; the last block of value features is partial.
CASES: tuple[tuple[str, str, str, dict[str, int], tuple[int, int, int, int]], ...] = (
    ("forward", "warp_specialized", f"B=1,H=2,T=70,K=64,V=40,{BF16},decay_form=clamp",
     {"quotients": 1}, (2, 2, 2, 8)),
    ("forward", "warp_specialized_tf32",
     f"B=1,H=1,T=70,K=40,V=64,{FP32},decay_form=log,final_state_dtype=fp32", {}, (4, 4, 4, 8)),
    ("backward", "warp_specialized", f"B=1,N=3,H=1,T=85,K=64,V=48,{BF16},decay_form=raw,{PACKED}",
     ROWS, (2, 2, 2, 8)),
    ("forward", "warp_specialized_segments", f"B=1,H=1,T=150,K=64,V=32,{BF16},decay_form=log",
     SEGMENTS, (2, 2, 2, 8)),
    ("forward", "warp_specialized", f"B=1,H=1,T=70,K=128,V=16,{BF16},decay_form=raw",
     {}, (1, 4, 2, 8)),
    ("forward", "warp_specialized_tf32", f"B=2,H=1,T=37,K=36,V=20,{FP16},decay_form=clamp",
     {}, (2, 1, 2, 4)),
    ("backward", "warp_specialized", f"B=1,H=1,T=70,K=24,V=64,{BF16},decay_form=clamp",
     ROWS | {"quotients": 1}, (4, 2, 4, 8)),
    ("forward", "warp_specialized_tf32",
     "B=1,H=2,T=53,K=40,V=36,dtype=fp32,decay_form=log,final_state_dtype=fp32", {}, (2, 2, 2, 4)),
    ("forward", "warp_specialized_tf32", "B=1,H=1,T=85,K=64,V=64,dtype=fp32,decay_form=raw",
     {}, (4, 4, 4, 4)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("pass_name", "name", "text", "others", "roles"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 3 else ()) for i, case in enumerate(CASES)],
)
def test_row_copies(
    pass_name: str, name: str, text: str, others: dict[str, int], roles: tuple[int, int, int, int]
) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant(pass_name, name)
    problem = parse_problem(text, entry.operator.signature)
    names = ("warps", "row_warps", "stages", "vec")
    values = dict(zip(names, roles, strict=True)) | {"min_blocks": 1, "row_copies": 1}
    demand_verified(entry, variant, problem, Config.of(variant.name, values | others))
