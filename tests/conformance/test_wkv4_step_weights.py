"""wkv4's backward `running_max` with gradients from the weights of the states' steps.

`test_host.py` draws configs of all parameters. Here every case has this config: each dtype and form
of w, a final state, a partial last round, and a partial tile.
"""

from __future__ import annotations

import pytest
from test_host import ROOMY, demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Value
from kgen.model.problem import parse_problem

STATE = "final_state_dtype=fp32"
CONFIG: dict[str, Value] = {
    "lanes": 8, "vec": 2, "segments": 4, "steps": 8, "prefetch": False, "min_blocks": 1,
    "step_weights": True,
}  # fmt: skip
CASES: tuple[tuple[str, dict[str, Value]], ...] = (
    (f"B=2,T=90,C=12,dtype=fp32,{STATE}", {}),
    ("B=1,T=150,C=13,dtype=bf16", {"vec": 1, "prefetch": True}),
    (f"B=1,T=77,C=34,dtype=fp32,{STATE},decay_form=raw",
     {"lanes": 32, "vec": 1, "segments": 2, "steps": 4}),
    (f"B=1,T=67,C=64,dtype=fp16,{STATE},w_dtype=dtype",
     {"lanes": 32, "segments": 2, "steps": 4, "prefetch": True}),
    # Slow decays and many steps: an error in the same direction at every step shows in gw.
    ("B=1,T=300,C=20,dtype=fp32", {"vec": 4, "segments": 16, "steps": 4}),
)  # fmt: skip


@pytest.mark.parametrize(("text", "changed"), CASES)
def test_gradients_by_step_weights(text: str, changed: dict[str, Value]) -> None:
    entry = open_catalogue().entry("wkv4")
    variant, signature = entry.space.variant("backward", "running_max"), entry.operator.signature
    problem, config = parse_problem(text, signature), variant.config({**CONFIG, **changed})
    demand_verified(entry, variant, problem, config, ROOMY)
