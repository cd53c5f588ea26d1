"""The bars of the timing protocol, and whether the measurements meet them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kgen.measure.stats import INDIFFERENCE
from kgen.measure_check.model import Quality

SAME_BAR = INDIFFERENCE
REGRET_BAR = 0.02


@dataclass(frozen=True, slots=True)
class BarResult:
    """One bar.

    Attributes:
        name: The quantity.
        worst: The value of the worst problem; None if nothing was measured.
        median: Median over everything measured.
        bar: The upper limit of `worst`.
        where: The worst problem.
    """

    name: str
    worst: float | None
    median: float | None
    bar: float
    where: str

    @property
    def kept(self) -> bool | None:
        """Whether the bar was met; None if it was not measured."""
        return None if self.worst is None else self.worst < self.bar


def judge_bars(quality: Quality) -> tuple[BarResult, ...]:
    """Judge the difference of a kernel from itself, and the regret of independent tunes."""
    same = [(p.same.difference.median, _where(p.pass_name, p.problem)) for p in quality.problems]
    regrets = [
        (regret, _where(p.pass_name, p.problem)) for p in quality.problems for regret in p.regrets
    ]
    if quality.tunes < 2:
        regrets = []
    return (
        _bar("difference of a kernel to itself", same, SAME_BAR),
        _bar("regret of independent tunes", regrets, REGRET_BAR),
    )


def _bar(name: str, values: list[tuple[float, str]], bar: float) -> BarResult:
    if not values:
        return BarResult(name, None, None, bar, "")
    worst, where = max(values)
    return BarResult(name, worst, statistics.median(value for value, _ in values), bar, where)


def _where(pass_name: str, problem: str) -> str:
    return f"{pass_name} {problem}"
