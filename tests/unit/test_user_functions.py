"""An operator of a user whose functions raise, or return something else: the error names what "
  "and where."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kgen.catalogue import open_catalogue
from kgen.check import PROOF_SIZES, Fixture
from kgen.errors import VerifyError
from kgen.model.problem import parse_problem
from kgen.operators.base import Operator
from kgen.trial.definition import definition_digest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorials" / "softmax"
Changed = Callable[[str, str], Operator]

RETURNS = 'return {"y": inputs["x"].softmax(dim=-1)}'
COSTS = 'return Cost(bytes=2 * m * n * problem.dtype("dtype").itemsize, flops=5 * m * n)'


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """The tutorial's operator with a part of its text replaced."""

    def change(old: str, new: str) -> Operator:
        mine = tmp_path / "mine"
        shutil.copytree(TUTORIAL, mine)
        file = mine / "operators" / "softmax.py"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        return open_catalogue([mine]).operator("softmax")

    return change


def proven(operator: Operator) -> None:
    """Make one input set with what is to come out of it."""
    problem = parse_problem("M=4,N=8,dtype=fp32", operator.signature)
    fixture = Fixture(operator, "forward", problem, torch.device("cpu"), sizes=PROOF_SIZES)
    fixture.input_set(fixture.schedule.whole())


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (RETURNS, 'return {"y": inputs["q"].softmax(dim=-1)}',
         r"softmax: definition raises KeyError: 'q'\n  at .*softmax\.py:\d+, called for "
         r"forward, x \("),
        (RETURNS, "return inputs['x']", r"definition returns a value of type Tensor"),
        (RETURNS, 'return {"y": [1.0]}', r"returns 'y' as a list"),
        (RETURNS, RETURNS.replace("}", "[:-1]}"), r"of shape \(\d+, \d+\), the signature declares "
                                                  r"\[M="),
        (RETURNS, RETURNS.replace("}", ".t()}"), r"of shape \(8, \d+\), the signature declares "
                                                 r"\[M="),
        ("dtype = getattr", 'raise OSError("no data")\n    dtype = getattr',
         r"softmax: make_inputs raises OSError: no data\n  at .*softmax\.py:\d+"),
        ('return {"x": x}', "return None", r"make_inputs returns None"),
        ("m, n = problem", "m, n = 1 // 0, problem", r"softmax: cost raises ZeroDivisionError"),
        (COSTS, "return None", r"cost returns None, for forward, M=.*\n  allowed: Cost\("),
        (COSTS, COSTS.replace("5 * m * n", 'float("nan")'), r"cost returns flops=nan"),
        (COSTS, COSTS.replace("5 * m * n", "-1"), r"cost returns flops=-1"),
    ],
)  # fmt: skip
def test_an_error_says_which_function_and_which_call(
    changed: Changed, old: str, new: str, told: str
) -> None:
    with pytest.raises(VerifyError, match=told):
        proven(changed(old, new))


def test_what_is_right_stays_as_it_is(changed: Changed) -> None:
    proven(changed(RETURNS, RETURNS))


def test_too_little_memory_is_no_fault_of_a_function(changed: Changed) -> None:
    operator = changed(RETURNS, "raise MemoryError")
    with pytest.raises(MemoryError):
        proven(operator)


def test_wrapping_does_not_change_what_a_record_is_of(changed: Changed) -> None:
    """The digest is of the user's text, not of what wraps it."""
    assert definition_digest(changed(RETURNS, RETURNS)) == definition_digest(
        open_catalogue([TUTORIAL]).operator("softmax")
    )


def test_a_digest_changes_with_the_function(changed: Changed) -> None:
    assert definition_digest(changed(RETURNS, RETURNS.replace("-1", "1"))) != definition_digest(
        open_catalogue([TUTORIAL]).operator("softmax")
    )
