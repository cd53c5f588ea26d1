"""wkv7's backward kernel of rows with blocks that loop over several chunks."""

from __future__ import annotations

import pytest
from test_host import demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BF16, FP16 = "dtype=bf16,w_dtype=bf16", "dtype=fp16,w_dtype=fp16"
PACKED = "cu_seqlens_dtype=int64"
ONE = {"warps": 1, "row_warps": 1, "stages": 2, "min_blocks": 1, "level_loop": 0}
COLUMNS = {"split": 4, "tile": 1, "columns": 16, "tokens": 4, "stages": 2}
# Variant, problem, parameters; warps of a block, chunks of a block. Loops end within a sequence and
# at its end, cross batch rows, and start with a partial chunk; packed sequences leave slots empty;
# K is no multiple of a block's keys.
CASES = (
    ("warp_specialized", f"B=2,H=2,T=150,K=32,V=48,{BF16},decay_form=raw", ONE, 2, 4),
    ("warp_specialized", f"B=1,H=1,T=141,K=64,V=64,{BF16},decay_form=clamp",
     ONE | {"state_bytes": 2}, 2, 8),
    ("warp_specialized", f"B=1,N=5,H=1,T=150,K=24,V=40,{BF16},decay_form=log,{PACKED}", ONE, 1, 4),
    ("chunk_rows", f"B=3,H=1,T=37,K=40,V=24,{FP16},decay_form=log", COLUMNS, 2, 4),
    ("chunk_rows", f"B=1,H=1,T=80,K=16,V=136,{BF16},decay_form=clamp", COLUMNS, 1, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "first", "warps", "chunks"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 3 else ()) for i, case in enumerate(CASES)],
)
def test_row_loop(name: str, text: str, first: dict[str, int], warps: int, chunks: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", name)
    problem = parse_problem(text, entry.operator.signature)
    rows = {"vec": 8, "chunk_warps": warps, "chunk_blocks": 1, "row_chunks": chunks}
    demand_verified(entry, variant, problem, Config.of(variant.name, first | rows))
