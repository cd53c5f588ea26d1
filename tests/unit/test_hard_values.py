"""Which inputs a verification may scale: those that all outputs are linear in."""

from __future__ import annotations

import pytest
import torch

from kgen.catalogue import open_catalogue
from kgen.check.case import Case
from kgen.check.hard_values import enlarged_by, linear_in
from kgen.model.problem import parse_problem

PACKED = "N=3,T=35,H=1,D=8,dtype=bf16,cu_seqlens_dtype=int32"


@pytest.mark.parametrize(
    ("operator", "pass_name", "text", "wanted"),
    [
        ("rmsnorm", "backward", "M=3,N=8,dtype=bf16", {"dy", "w", "offset"}),
        ("timex", "forward", "B=2,C=3,T=8,dtype=fp32", {"k", "w", "eps"}),
        ("wkv4", "backward", "B=2,T=35,C=8,dtype=bf16", {"gy", "v"}),
        ("wkv7", "forward", "B=2,T=35,H=1,D=8,dtype=bf16", {"r", "k", "v", "scale"}),
        # Of packed sequences of one or two steps, outputs would be linear in a decay.
        ("wkv6", "forward", f"B=1,{PACKED},decay_form=decay", {"r", "k", "v", "u", "scale"}),
        ("wkv6_decode", "forward", "B=2,T=1,H=2,D=8,dtype=bf16,decay_form=decay",
         {"r", "k", "v", "u", "scale", "state_pool"}),
    ],
)  # fmt: skip
def test_inputs_in_which_outputs_are_linear(
    operator: str, pass_name: str, text: str, wanted: set[str]
) -> None:
    found = open_catalogue().operator(operator)
    problem = parse_problem(text, found.signature)
    pass_ = problem.present(found.signature.pass_named(pass_name))
    arguments = found.arguments(pass_name, problem)
    assert linear_in(found, pass_, problem, arguments, torch.device("cpu")) == wanted


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("normal", "bf16", 1.0),
        ("large", "fp32", 2.0**14),
        ("huge", "bf16", 2.0**14),
        ("large and small", "bf16", 2.0**16),
        ("small and large", "fp16", 2.0**7),
    ],
)
def test_what_inputs_of_a_set_are_multiplied_by(name: str, dtype: str, expected: float) -> None:
    """The tolerance of terms that fp32 flushes to zero is as many times as large."""
    signature = open_catalogue().operator("wkv4").signature
    problem = parse_problem(f"B=1,T=3,C=8,dtype={dtype}", signature)
    case = Case(name, (), "contiguous", 0)
    assert enlarged_by(case, signature.pass_named("forward"), problem) == expected
