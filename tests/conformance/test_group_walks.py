"""linear_attention's warpgroups over several chunks, ragged ends and slices, with and without states.

Blocks of three warpgroups need more shared memory than the host's profile has: its limits are lifted here.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, ROOMY, SHUFFLED, run_configs

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.search.feasible import is_feasible

BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
TF32 = "dtype=fp32,product_dtype=tf32"
# Pass, problem, parts, bytes of a load.
CASES = (
    ("forward", "B=1,H=2,T=200,E=64,M=64,dtype=fp32", 3, 16),
    ("forward", f"B=1,H=1,T=150,E=40,M=72,dtype=fp32,{BEFORE},{BEHIND}", 3, 16),
    ("forward", f"B=1,H=1,T=129,E=14,M=30,dtype=fp32,{BEHIND}", 3, 8),
    ("forward", f"B=1,H=1,T=64,E=33,M=65,dtype=fp32,{BEFORE}", 3, 4),
    ("backward", "B=1,H=1,T=130,E=64,M=64,dtype=fp32", 3, 16),
    ("backward", f"B=1,H=1,T=100,E=40,M=64,dtype=fp32,{BEFORE},{BEHIND}", 3, 16),
    ("backward", f"B=1,H=1,T=100,E=33,M=24,{TF32},{BEHIND}", 2, 4),
    ("forward", f"B=1,H=1,T=321,E=64,M=48,{TF32},{BEFORE},{BEHIND}", 2, 16),
)


@pytest.mark.parametrize(("pass_name", "text", "parts", "copy"), CASES)
def test_chunks_and_states(pass_name: str, text: str, parts: int, copy: int) -> None:
    entry = open_catalogue().entry("linear_attention")
    variant, signature = entry.space.variant(pass_name, "warpgroups"), entry.operator.signature
    problem = parse_problem(text, signature)
    config = Config.of(variant.name, {"parts": parts, "copy": copy})
    assert is_feasible(
        variant, config, signature.pass_named(pass_name), problem, ROOMY, legality_only=True
    )
    for _, _, outcome in run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK, SHUFFLED)
    ):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
