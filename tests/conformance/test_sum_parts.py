"""linear_attention's chunked forward pass where the sum of a segment is made in parts.

`test_host.py` has sequences too short for segments; here parts are not whole or not there, segments
have several before them, and states, sums of keys and norms come and go.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, H200, SHUFFLED, run_configs

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue
from kgen.model.config import Value
from kgen.model.plan import make_plan
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.render import Renderer
from kgen.search.feasible import is_feasible

ENTRY = open_catalogue().entry("linear_attention")
SIGNATURE = ENTRY.operator.signature
VARIANT = ENTRY.space.variant("forward", "chunked")
SHARED = {"chunk": 16, "value_tiles": 1, "stages": 3, "min_blocks": 1}
BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
STATES = f"{BEFORE},{BEHIND}"
KEY_SUMS = "initial_key_sum_dtype=fp32,final_key_sum_dtype=fp32,norm_dtype=fp32"
# Warps along values and keys, bytes of a copy, segments, parts of each, whether kernels overlap.
CASES = (
    # Parts of 48 steps, the last one of 6.
    (f"B=1,H=2,T=150,E=32,M=32,dtype=fp32,{STATES},{KEY_SUMS}", 1, 2, 16, 2, 2, 0),
    # 16 and 16, then 8 and none.
    (f"B=1,H=2,T=40,E=24,M=40,dtype=fp32,{STATES},{KEY_SUMS}", 1, 1, 16, 2, 2, 1),
    # 16, 4, none and none, and a segment without steps.
    (f"B=2,H=1,T=20,E=16,M=16,dtype=fp32,{STATES},{KEY_SUMS}", 1, 1, 16, 2, 4, 1),
    # The third segment ends in its second part, the fourth has no steps.
    (f"B=1,H=3,T=90,E=16,M=40,dtype=bf16,{STATES}", 1, 1, 16, 4, 2, 1),
    (f"B=1,H=1,T=300,E=18,M=18,dtype=fp16,{BEHIND}", 2, 1, 4, 4, 4, 0),
    # One part, as without parts, but in the order of blocks of kernels that overlap.
    (f"B=1,H=2,T=150,E=32,M=48,dtype=bf16,{BEFORE}", 2, 2, 16, 4, 1, 1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value_warps", "key_warps", "copy", "segments", "sum_parts", "overlap"), CASES
)
def test_parts_that_are_not_whole_or_not_there(
    text: str,
    value_warps: int,
    key_warps: int,
    copy: int,
    segments: int,
    sum_parts: int,
    overlap: int,
) -> None:
    problem = parse_problem(text, SIGNATURE)
    config = VARIANT.config(
        {**SHARED, "value_warps": value_warps, "key_warps": key_warps, "copy": copy,
         "segments": segments, "sum_parts": sum_parts, "overlap": overlap}
    )  # fmt: skip
    pass_ = SIGNATURE.pass_named("forward")
    assert is_feasible(VARIANT, config, pass_, problem, H200, legality_only=True)
    plan = make_plan(VARIANT, config, problem, H200)
    sums, outputs = (launch.grid[0] for launch in plan.launches)
    assert sums == outputs // segments * (segments - 1) * sum_parts
    heads = problem.dim("B") * problem.dim("H")
    assert {w.name: w.elements for w in plan.workspaces}["key_parts"] == (
        heads * (segments - 1) * sum_parts * problem.dim("E")
    )
    wanted = [(problem, config)]
    for _, _, outcome in run_configs(ENTRY, VARIANT, "host", wanted, (BY_RANK, SHUFFLED)):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


def test_neither_parts_nor_overlap_is_what_it_was() -> None:
    """Rows and records from before there was a choice go on being those of today's kernels."""
    values = {**SHARED, "value_warps": 1, "key_warps": 1, "copy": 16, "segments": 4}
    config = VARIANT.config(values)
    assert VARIANT.config({**values, "sum_parts": 1, "overlap": 0}) == config
    assert not {"sum_parts", "overlap"} & config.as_dict().keys()
    problem = parse_problem("B=1,H=1,T=150,E=16,M=16,dtype=fp32", SIGNATURE)
    renderer = Renderer(include_dir())
    choices: tuple[dict[str, Value], ...] = ({}, {"sum_parts": 2}, {"overlap": 1})
    plain, parts, early = (
        renderer.render("linear_attention", ENTRY.templates, VARIANT, chosen, problem).source
        for chosen in (VARIANT.config({**values, **more}) for more in choices)
    )
    for word in ("kSumParts", "kParts", "dependent_launch", "_kernel", "gridDim"):
        assert word not in plain
    for line in (
        "place(steps, kChunk, kSegments, kSegments - 1, kSlices);",
        "place(steps, kChunk, kSegments, kSegments, kSlices);",
        "states.count = place.segment;",
    ):
        assert line in plain
    assert "kSumParts = 2;" in parts
    assert "dependent_launch" not in parts
    assert early.count("kgen::let_next_kernel_start()") == 1
    assert early.count("kgen::wait_for_earlier_kernel(") == 2
