"""linear_attention's chunked forward pass where the sum of a segment is made in parts.

`test_host.py` has sequences too short for segments; here parts are not whole or not there, segments
have several before them, and states, sums of keys and norms come and go.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, H200, SHUFFLED, run_configs

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue
from kgen.model.artifact import Artifact, BuildRequest
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
# Warps along values and keys, bytes of a copy, segments, parts of each.
CASES = (
    # Parts of 48 steps, the last one of 6.
    (f"B=1,H=2,T=150,E=32,M=32,dtype=fp32,{STATES},{KEY_SUMS}", 1, 2, 16, 2, 2),
    # 16 and 16, then 8 and none; of the last slice's values, half are there.
    (f"B=1,H=2,T=40,E=24,M=40,dtype=fp32,{STATES},{KEY_SUMS}", 1, 1, 16, 2, 2),
    # 16, 4, none and none, and a segment without steps.
    (f"B=2,H=1,T=20,E=16,M=16,dtype=fp32,{STATES},{KEY_SUMS}", 1, 1, 16, 2, 4),
    # The third segment ends in its second part, the fourth has no steps.
    (f"B=1,H=3,T=90,E=16,M=40,dtype=bf16,{STATES}", 1, 1, 16, 4, 2),
    # Rows of states that are no multiples of 16 bytes; the second in two slices, behind a state.
    (f"B=1,H=1,T=300,E=18,M=18,dtype=fp16,{BEHIND}", 2, 1, 4, 4, 4),
    (f"B=1,H=2,T=70,E=24,M=30,dtype=bf16,{STATES}", 1, 2, 4, 2, 2),
    # More rows of a state than a thread adds at once, of a number that is no multiple of it.
    (f"B=1,H=1,T=140,E=88,M=16,dtype=fp32,{BEFORE}", 1, 1, 16, 4, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value_warps", "key_warps", "copy", "segments", "sum_parts"), CASES
)
def test_parts_that_are_not_whole_or_not_there(
    text: str, value_warps: int, key_warps: int, copy: int, segments: int, sum_parts: int
) -> None:
    problem = parse_problem(text, SIGNATURE)
    config = VARIANT.config(
        {**SHARED, "value_warps": value_warps, "key_warps": key_warps, "copy": copy,
         "segments": segments, "sum_parts": sum_parts}
    )  # fmt: skip
    pass_ = SIGNATURE.pass_named("forward")
    assert is_feasible(VARIANT, config, pass_, problem, H200, legality_only=True)
    plan = make_plan(VARIANT, config, problem, H200)
    sums, outputs = (launch.grid[0] for launch in plan.launches)
    assert sums == outputs // segments * (segments - 1) * sum_parts
    heads, keys, values = (problem.dim("B") * problem.dim("H"), problem.dim("E"), problem.dim("M"))
    parts = heads * (segments - 1) * sum_parts
    assert {w.name: w.elements for w in plan.workspaces} == {
        "parts": (parts + heads * (segments - 1)) * keys * values,
        "key_parts": parts * keys,
    }
    wanted = [(problem, config)]
    for _, _, outcome in run_configs(ENTRY, VARIANT, "host", wanted, (BY_RANK, SHUFFLED)):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


def test_without_parts_it_is_what_it_was() -> None:
    """Rows and records from before there was a choice go on being those of today's kernels."""
    values = {**SHARED, "value_warps": 1, "key_warps": 1, "copy": 16, "segments": 4}
    config = VARIANT.config(values)
    assert VARIANT.config({**values, "sum_parts": 1}) == config
    assert "sum_parts" not in config.as_dict()
    problem = parse_problem("B=1,H=1,T=150,E=16,M=16,dtype=fp32", SIGNATURE)
    assert [w.elements for w in make_plan(VARIANT, config, problem, H200).workspaces] == [
        3 * 16 * 16, 3 * 16
    ]  # fmt: skip
    renderer = Renderer(include_dir())
    whole, parts = (
        renderer.render("linear_attention", ENTRY.templates, VARIANT, chosen, problem).source
        for chosen in (config, VARIANT.config({**values, "sum_parts": 2}))
    )
    for word in ("kSumParts", "kParts", "kSums", "part_sums", "first_key_sum"):
        assert word not in whole
        assert word in parts
    for line in (
        "place(steps, kChunk, kSegments, kSegments - 1, kSlices);",
        "place(steps, kChunk, kSegments, kSegments, kSlices);",
        "states.count = place.segment;",
        "const float* __restrict__ parts,      // [B * H, segments - 1, E, M]",
    ):
        assert line in whole
        assert line not in parts


def test_parts_compile_without_spills() -> None:
    """The block's addition ahead of the walk takes no registers that the walk would miss."""
    problem = parse_problem("B=8,H=16,T=4096,E=64,M=64,dtype=fp32", SIGNATURE)
    config = next(c for c in VARIANT.first if "sum_parts" in c.as_dict())
    assert is_feasible(VARIANT, config, SIGNATURE.pass_named("forward"), problem, H200)
    rendered = Renderer(include_dir()).render(
        "linear_attention", ENTRY.templates, VARIANT, config, problem
    )
    compiler = open_compiler("nvrtc", [include_dir()])
    for arch in ("sm_90a", "sm_80"):
        (built,) = compiler.build([BuildRequest(rendered, arch)])
        assert isinstance(built, Artifact), f"{arch}: {built}"
        for kernel, used in built.resources:
            assert used.spill_bytes == 0, f"{arch} {kernel}: {used}"
    compiler.close()
