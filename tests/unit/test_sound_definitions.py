"""An operator whose own functions let every kernel pass is refused, with a next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.catalogue import open_catalogue
from kgen.check import Fixture
from kgen.errors import VerifyError
from kgen.model.problem import Problem, parse_problem
from kgen.operators.base import Operator

CPU = torch.device("cpu")
OPERATOR = open_catalogue().entry("rmsnorm").operator

Tensors = Mapping[str, Tensor]
Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def fixture_of(**changes: Any) -> Fixture:
    problem = parse_problem("M=37,N=40,dtype=fp32", OPERATOR.signature)
    operator: Operator = replace(OPERATOR, **changes)
    return Fixture(operator, "forward", problem, CPU, seed=3)


def verify_with(**changes: Any) -> None:
    fixture = fixture_of(**changes)
    fixture.input_set(fixture.schedule.whole())


def defined(change: Change) -> dict[str, Any]:
    def definition(
        pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
    ) -> dict[str, Tensor]:
        return change(OPERATOR.definition(pass_name, inputs, scalars))

    return {"definition": definition}


def drawing(change: Change, seed: int | None = None) -> dict[str, Any]:
    def make_inputs(
        pass_name: str, problem: Problem, case: str, generator: torch.Generator,
        device: torch.device,
    ) -> dict[str, Tensor]:
        if seed is not None:
            generator = torch.Generator(device=device).manual_seed(seed)
        return change(OPERATOR.make_inputs(pass_name, problem, case, generator, device))

    return {"make_inputs": make_inputs}


def every(value: Callable[[Tensor], Tensor]) -> Change:
    return lambda found: {
        n: value(y) if y.is_floating_point() else y for n, y in found.items()
    }


def test_the_operator_itself_passes() -> None:
    verify_with()


def _counted() -> Change:
    calls = []

    def change(found: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        return {n: y * (1.0 + len(calls) / 1024) for n, y in found.items()}

    return change


def _with_default_dtype(found: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)
    return found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (defined(every(torch.zeros_like)), "the same 'y' for all inputs"),
        (defined(every(torch.ones_like)), "the same 'y' for all inputs"),
        (defined(every(lambda y: y * torch.nan)), "without a finite value"),
        (defined(_counted()), "another 'y' for the same inputs"),
        (defined(every(lambda y: y + torch.rand_like(y))), "changes torch's global generator"),
        (defined(_with_default_dtype), "changes torch's default dtype"),
        (drawing(every(torch.ones_like)), "the same values for the case 'normal' from every seed"),
        (drawing(every(lambda x: x), seed=5), "the same values for the case 'normal'"),
        (drawing(_counted()), "draws another '[a-z]' from the same seed"),
        (drawing(every(torch.rand_like)), "make_inputs changes torch's global generator"),
        (
            {"scale": lambda pass_name, inputs, outputs, scalars: every(
                lambda y: torch.full_like(y, 1e9))(dict(outputs))},
            "a kernel that returned zeros",
        ),
    ],
)  # fmt: skip
def test_functions_that_tell_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    before = torch.get_default_dtype()
    try:
        with pytest.raises(VerifyError, match=said):
            verify_with(**changes)
    finally:
        torch.set_default_dtype(before)


def _fixture_without_norm(definition: Any = None) -> Fixture:
    """linear_attention backward, where no output depends on the initial sum of keys."""
    operator = open_catalogue().entry("linear_attention").operator
    text = "B=1,H=1,T=3,E=2,M=2,dtype=fp32,initial_state_dtype=fp32,initial_key_sum_dtype=fp32"
    problem = parse_problem(text, operator.signature)
    if definition is not None:
        operator = replace(operator, definition=definition(operator.definition))
    return Fixture(operator, "backward", problem, torch.device("cpu"))


def test_a_gradient_that_is_zero_beside_others() -> None:
    made = _fixture_without_norm()
    gradients = made.input_set(made.schedule.whole())
    assert "ginitial_key_sum" in gradients.outputs


def test_a_constant_output_beside_others_is_refused() -> None:
    def with_ones(definition: Any) -> Any:
        def changed(pass_name: str, inputs: Any, scalars: Any) -> dict[str, Tensor]:
            found = dict(definition(pass_name, inputs, scalars))
            found["ginitial_key_sum"] = torch.ones_like(found["ginitial_key_sum"])
            return found

        return changed

    made = _fixture_without_norm(with_ones)
    with pytest.raises(VerifyError, match="the same 'ginitial_key_sum' for all inputs"):
        made.input_set(made.schedule.whole())
