"""What the compiler says that makes a winner's kernels slow reaches the report and the terminal."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from test_tune_settle import problem

from kgen.cli import tune_command
from kgen.tune.request import ProblemResult
from kgen.workflow.publish import _problem as reported

REMARK = "C7512: wgmma.mma_async instructions are serialized due to too few registers"


@pytest.fixture
def found() -> ProblemResult:
    """A problem whose winner has a remark; the other finalist has none."""
    settled = problem("a")
    winner, *others = settled.finalists
    said = replace(winner, artifact=replace(winner.artifact, remarks=(REMARK,)))
    return replace(settled, finalists=(said, *others))


def test_report(found: ProblemResult) -> None:
    request = cast("Any", SimpleNamespace(pass_name="forward", l2="cold"))
    assert reported(found, request, "e1").chosen.remarks == (REMARK,)
    assert reported(problem("a"), request, "e1").chosen.remarks == ()


def test_terminal(found: ProblemResult, capsys: pytest.CaptureFixture[str]) -> None:
    tune_command._print_problem(found)
    assert f"    the compiler says of it: {REMARK}\n" in capsys.readouterr().out
    tune_command._print_problem(problem("a"))
    assert "compiler" not in capsys.readouterr().out
