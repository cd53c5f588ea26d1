"""linear_attention's chunk_scan_norm over many chunks, with states and without.

`test_host.py` has sequences of a few chunks. Here a ring buffer in shared memory is reused, a
segment has several chunks, the last one is partial, and 16-bit tensors have an fp32 gradient of the
initial state, which needs separate operands. The norms are those of a forward pass, so that terms
cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_host import BY_RANK, FEW_BYTES, ROOMY, SHUFFLED, run_configs, with_other_scalars

from kgen.catalogue import open_catalogue
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.operators.base import Operator
from kgen.search.feasible import is_feasible

NORM = "norm_dtype=fp32"
STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
KEY_SUMS = "initial_key_sum_dtype=fp32,final_key_sum_dtype=fp32"
ONE = {"chunk": 16, "value_tiles": 1, "value_warps": 1, "key_warps": 1, "stages": 3,
       "copy_bytes": 16, "segments": 1, "min_blocks": 1, "scan_vec": 1}  # fmt: skip
CASES = (
    (f"B=1,H=2,T=150,E=24,M=40,dtype=bf16,{STATES},{KEY_SUMS},{NORM}", {"value_warps": 2}),
    (f"B=1,H=1,T=250,E=32,M=16,dtype=fp16,{STATES},{KEY_SUMS},{NORM}",
     {"segments": 4, "key_warps": 2, "scan_vec": 4, "overlap": 1}),
    (f"B=1,H=1,T=200,E=32,M=48,dtype=bf16,{NORM}",
     {"chunk": 32, "key_warps": 4, "value_tiles": 2, "segments": 2, "overlap": 1}),
    (f"B=1,H=1,T=70,E=8,M=136,dtype=fp32,{STATES},{KEY_SUMS}", {"key_warps": 2, "segments": 2}),
)  # fmt: skip


# If the state were read as one rounded term, gq would exceed its bound, and in fp16 also gk.
CANCELLING = (
    (f"B=1,H=1,T=160,E=16,M=1,dtype=bf16,{NORM}", {"chunk": 32, "copy_bytes": 2}),
    (f"B=1,H=1,T=160,E=16,M=8,dtype=fp16,{NORM}", {"chunk": 32}),
)
# With three products of scores with values instead of six, gv would exceed its bound.
POSITIVE_KEYS = (f"B=3,H=20,T=20,E=63,M=67,dtype=fp32,{NORM}",
                 {"chunk": 32, "value_warps": 2, "key_warps": 2, "copy_bytes": 4})  # fmt: skip


@pytest.mark.parametrize(("text", "changes"), CASES)
def test_many_chunks(text: str, changes: dict[str, int]) -> None:
    check(text, changes, (BY_RANK, SHUFFLED), with_other_scalars)


@pytest.mark.parametrize(("text", "changes"), CANCELLING)
def test_norms_of_a_forward_pass(text: str, changes: dict[str, int]) -> None:
    check(text, changes, (BY_RANK,), with_norms_of_a_forward_pass)


def test_products_with_scores_of_positive_keys() -> None:
    check(*POSITIVE_KEYS, (BY_RANK,), lambda operator: operator)


def with_norms_of_a_forward_pass(operator: Operator) -> Operator:
    """The operator with norm and gout_dot_out computed from q, k, v and gout; others are drawn."""

    def inputs(
        pass_name: str, problem: Problem, case: str, drawn: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        made = operator.make_inputs(pass_name, problem, case, drawn, device)
        if case == "nonfinite":  # a norm that is NaN would make all outputs NaN
            return made
        rows = {name: made[name].double() for name in ("q", "k", "v")}
        scalars = {"scale": 1.0, "eps": 0.0, "return_norm": 1.0}
        found = operator.definition("forward", rows, scalars)
        dots = (made["gout"].double() * found["out"]).sum(-1)
        return {**made, "norm": found["norm"].float(), "gout_dot_out": dots.float()}

    return replace(operator, make_inputs=inputs)


def check(
    text: str,
    changes: dict[str, int],
    orders: tuple[int, ...],
    changed: Callable[[Operator], Operator],
) -> None:
    """Certify one config on one problem."""
    entry = open_catalogue().entry("linear_attention")
    variant = entry.space.variant("backward", "chunk_scan_norm")
    signature = entry.operator.signature
    problem = parse_problem(text, signature)
    config = variant.config({"overlap": 0} | ONE | changes)
    pass_ = signature.pass_named("backward")
    assert is_feasible(variant, config, pass_, problem, ROOMY, legality_only=True)
    outcomes = run_configs(
        entry, variant, "host", [(problem, config)], orders, changed, FEW_BYTES
    )
    for _, _, outcome in outcomes:
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"
