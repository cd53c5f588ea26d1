"""Learnt rules of the generated tables: which one covers a call, what it chooses, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .rows import Call, Row, Rule


class _Named(int):
    """An extent under its name, which writes down what it is compared with.

    A rule is plain Python, so that people can read it. Run on these it says which way it went.
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
    rules: Iterable[Rule], dims: Mapping[str, int], dtypes: tuple[str, ...]
) -> Rule | None:
    """Return the rule for problems of these dtypes with these compiled-in dims, if there is one."""
    for rule in rules:
        if rule.dtypes == dtypes and all(dims[name] == value for name, value in rule.constants):
            return rule
    return None


def first_fitting(rule: Rule, rows: Iterable[Row], call: Call) -> Row | None:
    """Return the row that a rule prefers among those that may serve a call."""
    named = {row.record: row for row in rows}
    chosen = (named[record] for record in rule.choose(call) if record in named)
    return next((row for row in chosen if row.fits(call)), None)


def path_text(rule: Rule, dims: Mapping[str, int], record: str) -> str:
    """Return the comparisons that lead a rule to a row: `M = 700 > 24, M = 700 <= 720`."""
    seen: list[str] = []
    named = {name: _Named.of(value, name, seen) for name, value in dims.items()}
    records = rule.choose(Call(**named))
    steps = ", ".join(seen) or "one row for all"
    place = records.index(record)
    return steps if place == 0 else f"{steps}; choice {place + 1}, the ones before do not fit"


def evidence_text(rule: Rule) -> str:
    """Return what a rule was learnt from, and how far it is from the best there."""
    return (f"learnt from {rule.problems} problems, {100 * rule.mean_loss:.1f} % above the best "
            f"kernel of each on average, {100 * rule.worst_loss:.1f} % at worst")
