"""The compiler's performance remarks about a winner reach the report and the terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_tune_confirmation import problem

from kgen.cli.summary import _problem as printed
from kgen.tune.publish import _problem as reported
from kgen.tune.results import ProblemResult

REMARK = "C7512: wgmma.mma_async instructions are serialized due to too few registers"


@pytest.fixture
def found() -> ProblemResult:
    """A problem whose winner has a remark; the other finalist has none."""
    settled = problem("a")
    winner, *others = settled.finalists
    said = replace(winner, artifact=replace(winner.artifact, remarks=(REMARK,)))
    return replace(settled, finalists=(said, *others))


def test_report(found: ProblemResult) -> None:
    assert reported(found, "forward", "cold", "e1").chosen.remarks == (REMARK,)
    assert reported(problem("a"), "forward", "cold", "e1").chosen.remarks == ()


def test_terminal(found: ProblemResult) -> None:
    assert f"    the compiler says of it: {REMARK}" in printed(found, "a")
    assert not any("compiler" in line for line in printed(problem("a"), "a"))
