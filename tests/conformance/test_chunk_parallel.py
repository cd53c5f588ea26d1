"""linear_attention's chunk_parallel with an initial state, a final state, both or neither.

`test_host.py` has one choice of states for bf16, and chunks of a few steps. Here a sequence has
several chunks, the last one partial, and a CTA has fewer features than a head.
"""

from __future__ import annotations

import pytest
from test_host import HOST, demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem

BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
KEY_SUMS = "initial_key_sum_dtype=fp32,final_key_sum_dtype=fp32"
# Problem; chunk, step_tiles and block_v of the gradients' kernel; tile, warps and batch of states.
CASES = (
    ("B=1,H=2,T=150,E=64,M=48,dtype=bf16", (64, 1, 32), (32, 16), (2, 1), 32),
    (f"B=1,H=1,T=300,E=24,M=40,dtype=bf16,{BEFORE}",
     (128, 2, 32), (32, 64), (1, 2), 64),
    (f"B=1,H=1,T=70,E=64,M=64,dtype=bf16,{BEFORE},{BEHIND}",
     (32, 2, 64), (64, 32), (2, 1), 16),
    (f"B=1,H=1,T=70,E=64,M=64,dtype=bf16,{KEY_SUMS}",
     (32, 2, 64), (64, 32), (2, 1), 16),
)  # fmt: skip


@pytest.mark.parametrize(("text", "outputs", "tile", "warps", "batch"), CASES)
def test_states_before_and_behind(
    text: str,
    outputs: tuple[int, int, int],
    tile: tuple[int, int],
    warps: tuple[int, int],
    batch: int,
) -> None:
    entry = open_catalogue().entry("linear_attention")
    variant, signature = entry.space.variant("backward", "chunk_parallel"), entry.operator.signature
    problem = parse_problem(text, signature)
    values = dict(zip(("chunk", "step_tiles", "block_v"), outputs, strict=True))
    values |= dict(zip(("state_keys", "state_values"), tile, strict=True))
    values |= dict(zip(("state_key_warps", "state_value_warps"), warps, strict=True))
    values |= {"min_blocks": 1, "copy_bytes": 16, "batch": batch, "stages": 3}
    config = Config.of(variant.name, values)
    demand_verified(entry, variant, problem, config, HOST)
