"""Which inputs a verification may scale: those that all outputs are linear in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kgen.catalogue import open_catalogue
from kgen.check.case import Case
from kgen.check.fixture import Fixture
from kgen.check.hard_values import enlarged_by, linear_in
from kgen.check.sizes import HOST_SIZES
from kgen.errors import InexactDefinitionError
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


def wkv7_fixture() -> Fixture:
    operator = open_catalogue().operator("wkv7")
    problem = parse_problem(
        "B=1,N=1,T=20,H=1,K=8,V=3,dtype=fp32,w_dtype=fp32,initial_state_dtype=fp32,"
        "final_state_dtype=none,cu_seqlens_dtype=none,decay_form=raw",
        operator.signature,
    )
    return Fixture(operator, "forward", problem, torch.device("cpu"), sizes=HOST_SIZES)


def test_hard_values_that_cancel_exactly_are_drawn_again() -> None:
    """With seed 242 every decay is nearly 0 and all of a are equal; the state's columns have whole
    numbers, and one of them has the sum 0: y is 0, but fp32 rounds the products before the sum.
    """
    fixture = wkv7_fixture()
    case = Case("shapes by rows", (), "contiguous", 242)
    made = fixture.input_set(case)
    assert made.case.name == case.name
    assert made.case.seed != case.seed
    plain = replace(case, seed=241)
    assert wkv7_fixture().input_set(plain).case == plain
    drawn = wkv7_fixture().values(made.case, made.problem)
    for name, value in made.values.items():
        assert torch.equal(value, drawn[name])
    assert fixture.input_set(case) is made
    assert wkv7_fixture().input_set(case).case == made.case  # the same wherever it is drawn
    fixture.spoiled(made)
    assert fixture.input_set(case) is not made


@pytest.mark.parametrize(
    ("name", "draws"), [("shapes by rows", 4), ("nan with huge", 4), ("huge", 1), ("normal", 1)]
)
def test_only_hard_values_are_drawn_again_and_not_for_ever(
    name: str, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    def make(case: Case) -> None:
        seeds.append(case.seed)
        raise InexactDefinitionError("inexact")

    fixture = wkv7_fixture()
    monkeypatch.setattr(fixture, "_make", make)
    with pytest.raises(InexactDefinitionError):
        fixture.input_set(Case(name, (), "contiguous", 7))
    assert (seeds[0], len(set(seeds)), len(seeds)) == (7, draws, draws)
