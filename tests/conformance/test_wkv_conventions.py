"""wkv's kernels with packed sequences, w in a form that is not the default: a problem each.

`test_host.py` has them among all the others, but few of each.
"""

from __future__ import annotations

import pytest
from test_host import BY_RANK, SHUFFLED, all_variants, run_configs, spread

from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem
from kgen.model.record import Fate

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
PROBLEMS = {
    "wkv6": f"B=1,N=5,T=67,H=2,K=16,V=12,dtype=fp32,{STATES},cu_seqlens_dtype=int32,decay_form=raw",
    "wkv5": "B=1,N=3,T=67,H=2,K=16,V=8,dtype=bf16,cu_seqlens_dtype=int64,decay_form=decay",
}


@pytest.mark.parametrize(
    ("operator", "pass_name", "name"), [v for v in all_variants() if v[0] in PROBLEMS]
)
def test_conventions(operator: str, pass_name: str, name: str) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant(pass_name, name)
    problem = parse_problem(PROBLEMS[operator], entry.operator.signature)
    (config,) = spread(variant, entry.operator.signature, problem, count=1)
    orders = (BY_RANK, SHUFFLED)
    ((_, _, outcome),) = run_configs(entry, variant, "host", [(problem, config)], orders)
    assert outcome.fate is Fate.VERIFIED, f"{config.label}\n{outcome.reason}"
