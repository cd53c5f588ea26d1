"""Compare two reports of one operator and GPU: which problems became faster, slower, stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from kgen.model.units import format_us
from kgen.report.model import ProblemReport, Report
from kgen.report.tables import ReportRow
from kgen.report.verdicts import is_tie

Change = Literal["faster", "slower", "tie", "stale", "new", "gone"]

_MEANING: Mapping[Change, str] = {
    "faster": "the quartiles lie below the old ones",
    "slower": "the quartiles lie above the old ones",
    "tie": "the quartiles overlap",
    "stale": "not measured again: both reports have the same measurement",
    "new": "not in the old report",
    "gone": "not in the new report",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A problem that is in both reports, or in one of them.

    Attributes:
        label: Short name of the problem.
        pass_name: `forward` or `backward`.
        change: The change of the problem's time.
        old: The problem's entry in the old report.
        new: The problem's entry in the new report.
    """

    label: str
    pass_name: str
    change: Change
    old: ProblemReport | None
    new: ProblemReport | None

    @property
    def ratio(self) -> float | None:
        """Old time over new time: above 1 is faster."""
        if self.old is None or self.new is None:
            return None
        return self.old.chosen.timing.median_us / self.new.chosen.timing.median_us


def compare_rows(old: Sequence[ReportRow], new: Sequence[ReportRow]) -> list[Pair]:
    """Pair the rows of two reports, new report's order first."""
    before = {(row.report.pass_name, row.report.problem): row for row in old}
    after = {(row.report.pass_name, row.report.problem): row for row in new}
    pairs = []
    for key, row in {**after, **{k: r for k, r in before.items() if k not in after}}.items():
        was = before[key].report if key in before else None
        now = after[key].report if key in after else None
        pairs.append(Pair(row.label, key[0], _change(was, now), was, now))
    return pairs


def _change(old: ProblemReport | None, new: ProblemReport | None) -> Change:
    if old is None:
        return "new"
    if new is None:
        return "gone"
    was, now = old.chosen.timing, new.chosen.timing
    if old.chosen.record == new.chosen.record and was == now:
        return "stale"
    if is_tie(was, now):
        return "tie"
    return "faster" if now.median_us < was.median_us else "slower"


def is_comparable(old: Report, new: Report) -> bool:
    """Whether two reports are of one operator and GPU."""
    return (old.operator, old.gpu) == (new.operator, new.gpu)


def print_pairs(old: Report, new: Report, pairs: Sequence[Pair]) -> str:
    """Return the comparison as text: differences between the machines, then each change."""
    lines = [f"{new.operator} on {new.gpu}, against an older report"]
    lines += [f"  {line}" for line in differing_environments(old, new)]
    for change, meaning in _MEANING.items():
        of_kind = [pair for pair in pairs if pair.change == change]
        if not of_kind:
            continue
        lines += ["", f"{change}: {len(of_kind)} ({meaning})"]
        lines += [_line(pair) for pair in sorted(of_kind, key=lambda p: -abs((p.ratio or 1) - 1))]
    return "\n".join(lines) + "\n"


def differing_environments(old: Report, new: Report) -> list[str]:
    """`driver: 570.1 -> 580.2` for each fact that no environment of the other report has."""
    lines = []
    facts = [[asdict(e) for e in report.environments.values()] for report in (old, new)]
    for name in facts[1][0] if all(facts) else ():
        was, now = ({str(e[name]) for e in side if e[name] is not None} for side in facts)
        if was.isdisjoint(now) and (was or now):
            lines.append(f"{name}: {', '.join(sorted(was))} -> {', '.join(sorted(now))}")
    return lines


def _line(pair: Pair) -> str:
    cells = f"  {pair.pass_name:8}  {pair.label:36}"
    times = [format_us(e.chosen.timing.median_us) for e in (pair.old, pair.new) if e is not None]
    ratio = "" if pair.ratio is None else f"  {pair.ratio:.3f}x"
    return f"{cells}  {' -> '.join(times)} us{ratio}" if pair.change != "stale" else (
        f"{cells}  {times[0]} us")
