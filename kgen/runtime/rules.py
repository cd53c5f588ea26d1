"""Evaluate and explain the learnt rules of a generated table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .rows import Call, DispatchRule, Row


class _Named(int):
    """A named extent that records each comparison made with it.

    A rule is a plain Python function. Called with such extents, it records in `seen` the
    comparisons that led to its result.
    """

    name: str
    seen: list[str]

    @classmethod
    def of(cls, value: int, name: str, seen: list[str]) -> _Named:
        made = cls(value)
        made.name, made.seen = name, seen
        return made

    def __mul__(self, other: int) -> _Named:
        name = other.name if isinstance(other, _Named) else str(int(other))
        return _Named.of(int(self) * int(other), f"{self.name} * {name}", self.seen)

    def __le__(self, other: int) -> bool:
        found = int(self) <= int(other)
        self.seen.append(f"{self.name} = {int(self)} {'<=' if found else '>'} {int(other)}")
        return found


def covering(
    rules: Iterable[DispatchRule], dims: Mapping[str, int], dtypes: tuple[str, ...]
) -> DispatchRule | None:
    """Return the rule that covers these dtypes and extents, or None.

    A rule is not used far beyond the extents from which it was learnt. At T = 8192, a rule of timex
    learnt up to T = 4096 chose a kernel that took 3.6 times the best kernel's time.
    """
    for rule in rules:
        if (rule.dtypes == dtypes
                and all(dims[name] == value for name, value in rule.constants)
                and are_near(dims, rule.extents)):
            return rule
    return None


def are_near(dims: Mapping[str, int], extents: Iterable[tuple[str, int, int]]) -> bool:
    """Whether each dim is within its range of extents, or outside by a factor of at most 1.5."""
    return all(2 * least <= 3 * dims[name] and 2 * dims[name] <= 3 * most
               for name, least, most in extents)


def first_fitting(rule: DispatchRule, rows: Iterable[Row], call: Call) -> Row | None:
    """Return the most preferred row of a rule whose conditions hold for a call, or None."""
    named = {row.record: row for row in rows}
    chosen = (named[record] for record in rule.choose(call) if record in named)
    return next((row for row in chosen if row.fits(call)), None)


def path_text(rule: DispatchRule, dims: Mapping[str, int], record: str) -> str:
    """Return the comparisons by which a rule reached a row: `M = 700 > 24, M = 700 <= 720`."""
    seen: list[str] = []
    named = {name: _Named.of(value, name, seen) for name, value in dims.items()}
    records = rule.choose(Call(**named))
    steps = ", ".join(seen) or "one row for all"
    place = records.index(record)
    if place == 0:
        return steps
    return f"{steps}; choice {place + 1}: the conditions of earlier choices do not hold"


def evidence_text(rule: DispatchRule) -> str:
    """Return a text with the number of problems from which a rule was learnt, and its loss."""
    return (f"learnt from {rule.problems} problems, {100 * rule.mean_loss:.1f} % above the best "
            f"kernel of each on average, {100 * rule.worst_loss:.1f} % at worst")
