"""The trials of a report's problems, from the journal beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.journal import Journal
from kgen.model.record import Fate, Record
from kgen.report.model import ProblemReport


@dataclass(frozen=True)
class Search:
    """The trials of one problem of one pass, oldest first.

    Attributes:
        trials: The trials of the search, without certificates, which repeat a trial and its time.
    """

    trials: tuple[Record, ...]

    @property
    def timed(self) -> tuple[Record, ...]:
        """Verified trials with a time."""
        return tuple(r for r in self.trials if r.timing is not None and r.fate is Fate.VERIFIED)

    @property
    def best(self) -> Record | None:
        """The trial with the least median. Its time is from a single short measurement."""
        return min(self.timed, key=_median, default=None)


def journal_beside(report: Path) -> Path:
    """The path of the journal with the trials of a report's problems."""
    return report.with_suffix(".trials.jsonl")


def searches_of(records: Iterable[Record]) -> dict[tuple[str, str], Search]:
    """Group records by pass and problem."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.evidence is None:
            found.setdefault((record.pass_name, record.problem), []).append(record)
    return {key: Search(tuple(trials)) for key, trials in found.items()}


def load_searches(report: Path) -> dict[tuple[str, str], Search]:
    """Read the journal beside a report; empty if there is none."""
    return searches_of(Journal(journal_beside(report)).read())


def search_of(
    searches: Mapping[tuple[str, str], Search], entry: ProblemReport
) -> Search:
    """The trials of a problem of a report."""
    return searches.get((entry.pass_name, entry.problem), Search(()))


def _median(record: Record) -> float:
    assert record.timing is not None
    return record.timing.median_us
