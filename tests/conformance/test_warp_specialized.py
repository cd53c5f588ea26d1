"""linear_attention's warp_specialized with several batches, of several chunks, and with states.

The sequences of `test_host.py` do not fill a batch. Here there are several producer and consumer
warps, the last batch is partial, and a head has several CTAs.
"""

from __future__ import annotations

import pytest
from test_host import HOST, demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
# Problem; block_v; chunk and number of chunks of a batch; producer warps; stages.
CASES = (
    ("B=1,H=2,T=150,E=32,M=32,dtype=bf16", 32, (16, 2), (2, 2), 3),
    (f"B=1,H=1,T=135,E=24,M=40,dtype=bf16,{BEFORE}", 32, (32, 1), (2, 1), 4),
    (f"B=1,H=1,T=129,E=64,M=48,dtype=bf16,{BEHIND}", 16, (16, 2), (4, 1), 3),
    (f"B=1,H=1,T=70,E=48,M=64,dtype=bf16,{BEFORE},{BEHIND}", 32, (16, 1), (1, 2), 5),
    ("B=1,H=1,T=150,E=16,M=16,dtype=bf16", 16, (64, 1), (1, 1), 3),
    (f"B=1,H=1,T=200,E=16,M=16,dtype=bf16,{BEFORE},{BEHIND}", 16, (16, 4), (1, 1), 3),
)  # fmt: skip


@pytest.mark.parametrize(("text", "block_v", "batch", "warps", "stages"), CASES)
def test_batches_and_states(
    text: str, block_v: int, batch: tuple[int, int], warps: tuple[int, int], stages: int
) -> None:
    entry = open_catalogue().entry("linear_attention")
    variant = entry.space.variant("forward", "warp_specialized")
    signature = entry.operator.signature
    problem = parse_problem(text, signature)
    values = dict(zip(("chunk", "chunks"), batch, strict=True))
    values |= dict(zip(("key_warps", "value_warps"), warps, strict=True))
    values |= {"block_v": block_v, "stages": stages, "copy_bytes": 16, "min_blocks": 1}
    config = Config.of(variant.name, values)
    demand_verified(entry, variant, problem, config, HOST)
