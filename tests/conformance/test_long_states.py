"""After thousands of steps a returned state is as accurate as after a few steps.

Tensor cores truncate the sum to which they add a product. An fp32 state of linear_attention that
stayed in a tensor-core accumulator had 2.8 times its bound as error after 8193 steps (bf16, E = M =
64, measured on an H200). wkv5's decay is the same in each step, and so is the rounding error of a
chunk's product of decays.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, FEW_BYTES, ROOMY, run_configs

from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.search.feasible import is_feasible

TILES = {"chunk": 16, "value_tiles": 1, "value_warps": 1, "key_warps": 1, "stages": 3,
         "copy_bytes": 16, "segments": 1, "min_blocks": 1}  # fmt: skip
STATE_TILES = {"step_tiles": 1, "block_v": 16, "state_keys": 16, "state_values": 16,
               "state_key_warps": 1, "state_value_warps": 1, "batch": 16}  # fmt: skip
STEPS = "B=1,H=1,T=8193,E=16,M=16,dtype=bf16"
SEGMENTS = {"warps": 1, "row_warps": 1, "stages": 2, "vec": 8, "min_blocks": 1}
HALVING = TILES | {"buffers": 1}
CASES: tuple[tuple[str, str, str, dict[str, int]], ...] = (
    ("forward", "chunk_loop", "final_state_dtype=fp32", {}),
    ("forward", "chunk_scan", "final_state_dtype=fp32,norm_dtype=fp32",
     {"segments": 2, "scan_vec": 1}),
    ("backward", "chunk_loop", "initial_state_dtype=fp32", {}),
    ("backward", "chunk_parallel", "initial_state_dtype=fp32", {"chunk": 32, "batch": 32}),
)  # fmt: skip


@pytest.mark.parametrize(("pass_name", "name", "options", "changes"), CASES)
def test_states_after_thousands_of_steps(
    pass_name: str, name: str, options: str, changes: dict[str, int]
) -> None:
    check("linear_attention", pass_name, name, f"{STEPS},{options}", TILES | STATE_TILES | changes)


@pytest.mark.parametrize("lane_keys", [1, 2])
def test_the_state_of_a_constant_decay(lane_keys: int) -> None:
    problem = "B=1,H=1,T=8193,K=16,V=16,dtype=fp16,final_state_dtype=fp32,decay_form=decay"
    check("wkv5", "forward", "chunk_halving", problem, HALVING | {"lane_keys": lane_keys})


@pytest.mark.parametrize(("operator", "form"), [("wkv5", "raw"), ("wkv5", "log"), ("wkv6", "log")])
@pytest.mark.parametrize("segments", [1, 2])
def test_the_state_of_segments(operator: str, form: str, segments: int) -> None:
    problem = f"B=1,H=1,T=8193,K=16,V=16,dtype=bf16,final_state_dtype=fp32,decay_form={form}"
    given = SEGMENTS | {"segments": segments}
    check(operator, "forward", "warp_specialized_states", problem, given)


def check(operator: str, pass_name: str, name: str, text: str, given: dict[str, int]) -> None:
    """Verify one config on one problem; `given` may name parameters of other variants."""
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    signature = entry.operator.signature
    problem = parse_problem(text, signature)
    config = variant.config({one.name: given[one.name] for one in variant.params
                             if one.name in given})
    pass_ = signature.pass_named(pass_name)
    assert is_feasible(variant, config, pass_, problem, ROOMY, legality_only=True)
    outcomes = run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK,), lambda operator: operator,
        FEW_BYTES,
    )  # fmt: skip
    for _, _, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
