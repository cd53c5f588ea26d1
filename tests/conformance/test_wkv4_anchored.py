"""wkv4's backward anchored: segments with a common anchor, segments whose keys are too far apart.

`test_host.py` draws configs of all parameters; here each dtype and form of w, a last round that is
not whole, a tile that is not, and parts of T have this variant. The input sets `large_keys` and
`nonfinite` take the steps of most segments one by one.
"""

from __future__ import annotations

import pytest
from test_host import ROOMY, demand_verified

from kgen.catalogue import open_catalogue
from kgen.model.config import Value
from kgen.model.problem import parse_problem

CONFIG: dict[str, Value] = {
    "lanes": 8, "vec": 2, "segments": 4, "steps": 8, "prefetch": False, "min_blocks": 1,
    "splits": 1,
}  # fmt: skip
CASES: tuple[tuple[str, dict[str, Value]], ...] = (
    ("B=2,T=90,C=12,dtype=fp32", {}),
    ("B=1,T=150,C=24,dtype=bf16", {"vec": 1, "prefetch": True}),
    ("B=1,T=77,C=36,dtype=fp32,decay_form=raw",
     {"lanes": 32, "vec": 1, "segments": 2, "steps": 4}),
    ("B=1,T=67,C=64,dtype=fp16,w_dtype=dtype",
     {"lanes": 32, "segments": 2, "steps": 4, "prefetch": True}),
    # Slow decays and many steps: an error in the same direction at every step shows in gw.
    ("B=1,T=300,C=20,dtype=fp32", {"vec": 4, "segments": 16, "steps": 4, "prefetch": True}),
    # Parts of T: of several rounds, of which the last one is not whole; one that has a round alone.
    ("B=2,T=300,C=12,dtype=fp32", {"segments": 2, "steps": 4, "lanes": 32, "vec": 1, "splits": 4}),
    ("B=1,T=129,C=16,dtype=bf16,decay_form=raw", {"splits": 8, "prefetch": True}),
    ("B=3,T=65,C=16,dtype=fp16", {"splits": 2}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changed"),
    # No GPU is offered this variant yet, so CI verifies one case.
    [pytest.param(*case, marks=pytest.mark.slow if i else ()) for i, case in enumerate(CASES)],
)
def test_gradients_by_one_anchor(text: str, changed: dict[str, Value]) -> None:
    entry = open_catalogue().entry("wkv4")
    variant, signature = entry.space.variant("backward", "anchored"), entry.operator.signature
    problem, config = parse_problem(text, signature), variant.config({**CONFIG, **changed})
    demand_verified(entry, variant, problem, config, ROOMY)
