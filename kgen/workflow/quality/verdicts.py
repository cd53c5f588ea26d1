"""The bars that the protocol sets itself, and whether it kept them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kgen.measure.stats import INDIFFERENCE
from kgen.workflow.quality.model import Quality

SAME_BAR = INDIFFERENCE
REGRET_BAR = 0.02


@dataclass(frozen=True, slots=True)
class Verdict:
    """One bar.

    Attributes:
        name: What it is about.
        worst: The worst problem's value; None if it was not measured.
        median: Over everything measured.
        bar: What `worst` must stay below.
        where: The worst problem.
    """

    name: str
    worst: float | None
    median: float | None
    bar: float
    where: str

    @property
    def kept(self) -> bool | None:
        """Whether the bar was kept; None if it was not measured."""
        return None if self.worst is None else self.worst < self.bar


def verdicts(quality: Quality) -> tuple[Verdict, ...]:
    """Judge the difference of a kernel to itself, and the regret of independent tunes."""
    same = [(p.same.difference.median, _where(p.pass_name, p.problem)) for p in quality.problems]
    regrets = [
        (regret, _where(p.pass_name, p.problem)) for p in quality.problems for regret in p.regrets
    ]
    if quality.tunes < 2:
        regrets = []
    return (
        _verdict("difference of a kernel to itself", same, SAME_BAR),
        _verdict("regret of independent tunes", regrets, REGRET_BAR),
    )


def _verdict(name: str, values: list[tuple[float, str]], bar: float) -> Verdict:
    if not values:
        return Verdict(name, None, None, bar, "")
    worst, where = max(values)
    return Verdict(name, worst, statistics.median(value for value, _ in values), bar, where)


def _where(pass_name: str, problem: str) -> str:
    return f"{pass_name} {problem}"
