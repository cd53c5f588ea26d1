"""The report of `kgen learn`. The field names are the keys; docs/report-format.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.errors import RecordError, why_unreadable
from kgen.model.units import format_us
from kgen.report import Environment, decode_as, encode_as, write_whole

SCHEMA = 1
SAFE = "safe"  # in place of a record if no row fits


@dataclass(frozen=True, slots=True)
class TrainingProblem:
    """A problem that a rule was learnt from.

    Attributes:
        problem: The problem.
        best_us: Least time of the configs tried there.
        best: Label of that config.
        loss: Time of the rule's choice over `best_us`, minus 1.
    """

    problem: str
    best_us: float
    best: str
    loss: float


@dataclass(frozen=True, slots=True)
class RuleReport:
    """One rule and its training.

    Attributes:
        pass_name: `forward` or `backward`.
        covers: The values that its problems share.
        tree: Its comparisons; records at the leaves, the preferred first.
        new_rows: Records of rows that the table got with it.
        mean_loss: Over the training problems.
        worst_loss: Over the training problems.
        training: The training problems.
    """

    pass_name: str
    covers: str
    tree: tuple[str, ...]
    new_rows: tuple[str, ...]
    mean_loss: float
    worst_loss: float
    training: tuple[TrainingProblem, ...]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out problem: the library's choice compared with the result of a search.

    All times are of one interleaved run.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        covers: The values that its rule's problems share.
        record: The record of the row that the library chooses: by the rule, or the nearest row if
            no row of the rule fits; `safe` if no row fits.
        rule_us: Time of that row.
        best_us: The shortest time in that run, among the best config of the search, the rule's
            choice and the nearest row.
        best: Label of the fastest config.
        loss: `rule_us` over `best_us`, minus 1.
        nearest_us: Time of the nearest tuned row, which would serve without a rule; None if none
            fits.
        nearest_loss: Loss of the nearest tuned row.
        trials: Number of trials of the search.
    """

    pass_name: str
    problem: str
    covers: str
    record: str
    rule_us: float
    best_us: float
    best: str
    loss: float
    nearest_us: float | None
    nearest_loss: float | None
    trials: int


@dataclass(frozen=True, slots=True)
class HeldOutLosses:
    """Losses of all held-out problems, as shares.

    Attributes:
        problems: Number of problems.
        mean_loss: Mean loss of the rule.
        worst_loss: Largest loss of the rule.
        nearest_mean_loss: Mean loss of the nearest row that fits; None if none fits.
        nearest_worst_loss: Largest loss of that row.
    """

    problems: int
    mean_loss: float
    worst_loss: float
    nearest_mean_loss: float | None
    nearest_worst_loss: float | None


@dataclass(frozen=True, slots=True)
class LearnReport:
    """All results of `kgen learn`, the newest about each rule.

    Attributes:
        operator: Operator name.
        gpu: Profile name.
        environment: The machine of the newest results, with the keys of a tuning report.
        verdict: Losses on held-out problems; None if there were none.
        held_out: The held-out problems.
        rules: The rules.
    """

    operator: str
    gpu: str
    environment: Environment
    verdict: HeldOutLosses | None
    held_out: tuple[HeldOut, ...]
    rules: tuple[RuleReport, ...]
    schema: int = SCHEMA


def judged(held_out: Sequence[HeldOut]) -> HeldOutLosses | None:
    """Summarise the held-out problems; None if there are none."""
    if not held_out:
        return None
    losses = [found.loss for found in held_out]
    nearest = [found.nearest_loss for found in held_out if found.nearest_loss is not None]
    return HeldOutLosses(
        len(losses),
        sum(losses) / len(losses),
        max(losses),
        sum(nearest) / len(nearest) if nearest else None,
        max(nearest, default=None),
    )


def merge_learning(old: LearnReport | None, new: LearnReport) -> LearnReport:
    """Merge two reports; for a rule in both, take the new rule and its new held-out problems."""
    if old is None:
        return new
    renewed = {(rule.pass_name, rule.covers) for rule in new.rules}
    held_out = tuple(h for h in old.held_out if (h.pass_name, h.covers) not in renewed)
    rules = tuple(rule for rule in old.rules if (rule.pass_name, rule.covers) not in renewed)
    held_out += new.held_out
    return replace(
        new, verdict=judged(held_out), held_out=held_out, rules=(*rules, *new.rules)
    )


def write_learning(path: Path, report: LearnReport) -> None:
    """Write a report as YAML.

    Raises:
        StorageError: If it cannot be written.
    """
    header = f"Rules of {report.operator} on {report.gpu}, written by kgen learn."
    write_whole(path, encode_as(report, header, report.schema))


def load_learning(path: Path) -> LearnReport:
    """Read and check a file that `write_learning` wrote.

    Raises:
        RecordError: If it cannot be read or deviates from the schema; names line and key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: cannot be read: {why_unreadable(problem)}") from None
    return decode_as(LearnReport, text, str(path), SCHEMA, "run 'kgen learn' again")


def print_learning(report: LearnReport) -> str:
    """Return the report as text: each rule, then the held-out problems."""
    lines: list[str] = []
    for rule in report.rules:
        lines += [
            f"{rule.pass_name} {rule.covers}",
            *(f"    {line}" for line in rule.tree),
            f"    {len(rule.training)} problems: mean loss {_percent(rule.mean_loss)}, worst "
            f"{_percent(rule.worst_loss)}; {len(rule.new_rows)} new rows",
        ]
    for found in report.held_out:
        nearest = "no row" if found.nearest_us is None else (
            f"{format_us(found.nearest_us)} us ({_percent(found.nearest_loss or 0.0)})")
        lines.append(
            f"held out: {found.pass_name} {found.problem}\n"
            f"    rule {format_us(found.rule_us)} us, search "
            f"{format_us(found.best_us)} us, loss {_percent(found.loss)}; nearest {nearest}"
        )
    if (verdict := report.verdict) is not None:
        lines.append(
            f"{verdict.problems} problems held out: mean loss {_percent(verdict.mean_loss)}, worst "
            f"{_percent(verdict.worst_loss)}"
        )
        if verdict.nearest_mean_loss is not None and verdict.nearest_worst_loss is not None:
            lines[-1] += (f"; nearest row: mean {_percent(verdict.nearest_mean_loss)}, worst "
                          f"{_percent(verdict.nearest_worst_loss)}")
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
