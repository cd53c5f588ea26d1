"""wkv7's warp_specialized_segments with several warps of each role, ragged ends, packed sequences.

`test_host.py` has one warp of each role, and short sequences, most of whose segments are empty.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, SHUFFLED, run_configs

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Fate

BEFORE, PACKED = "initial_state_dtype=fp32", "cu_seqlens_dtype=int64"
BF16 = "dtype=bf16,w_dtype=bf16"
# Segments; consumers of the last kernel, producers, consumers of the first; stages; elements per
# copy.
CASES = (
    (f"B=1,H=2,T=150,K=64,V=40,{BF16},decay_form=log,{BEFORE}", 3, (1, 4, 8), 2, 8),
    (f"B=1,H=1,T=264,K=64,V=64,{BF16},decay_form=clamp", 8, (4, 4, 8), 2, 8),
    (f"B=2,H=1,T=128,K=48,V=16,{BF16},decay_form=raw,{BEFORE}", 4, (1, 2, 2), 4, 8),
    ("B=1,H=2,T=97,K=20,V=18,dtype=bf16,decay_form=log", 3, (2, 4, 1), 2, 2),
    (f"B=1,H=1,T=100,K=7,V=5,{BF16},decay_form=clamp,{BEFORE}", 6, (1, 1, 2), 2, 1),
    (f"B=1,H=1,T=52,K=128,V=16,{BF16},decay_form=raw", 3, (1, 4, 4), 2, 8),
    (f"B=1,N=3,H=2,T=150,K=48,V=32,{BF16},decay_form=raw,{BEFORE},{PACKED}", 3, (2, 2, 4), 4, 8),
)  # fmt: skip


@pytest.mark.parametrize(("text", "segments", "warps", "stages", "vec"), CASES)
def test_segments(
    text: str, segments: int, warps: tuple[int, int, int], stages: int, vec: int
) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("forward", "warp_specialized_segments")
    problem = parse_problem(text, entry.operator.signature)
    values = dict(zip(("warps", "row_warps", "state_warps"), warps, strict=True))
    values |= {"segments": segments, "stages": stages, "vec": vec, "min_blocks": 1}
    config = Config.of(variant.name, values)
    for _, _, outcome in run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK, SHUFFLED)
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
