"""Searches as Optuna studies, which `optuna-dashboard FILE` opens.

Each search is a study. The variant is a parameter, and parameters of the same name in several
variants are one parameter, as in kgen's own surrogate model. Numeric choices are ordered, so that
importances and contours show 1, 2, 4, 8, 16 in this order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kgen.errors import StorageError
from kgen.model.config import Value
from kgen.model.record import Fate, Record
from kgen.report.searches import Search
from kgen.report.tables import ReportRow

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

VARIANT = "variant"
_SQLITE = (".db", ".sqlite", ".sqlite3")
_PAUSE_S = 60.0  # a longer gap between two trials is the time between two tunes
_LOG_FROM = 4  # least ratio of the largest to the least positive number for a log axis


@dataclass(frozen=True)
class StudyOf:
    """A search to write.

    Attributes:
        name: The name of the study.
        facts: User attributes of the study.
        search: Trials of the study.
    """

    name: str
    facts: Mapping[str, object]
    search: Search

    @classmethod
    def of_row(cls, row: ReportRow, search: Search) -> StudyOf:
        """The search of a problem of a report."""
        entry = row.report
        facts = {
            "operator": row.operator,
            "pass": entry.pass_name,
            "problem": entry.problem,
            "gpu": row.gpu,
            "floor_us": entry.floor_us,
            "winner": entry.chosen.label,
            "final_us": entry.chosen.timing.median_us,
        }
        return cls(f"{row.operator} {entry.pass_name} {row.label} {row.gpu}", facts, search)


def write_studies(path: Path, studies: Sequence[StudyOf]) -> int:
    """Write a study per search; return the number of trials.

    Args:
        path: An SQLite file if it ends in .db, .sqlite or .sqlite3, else a file of Optuna's journal
            storage. An existing file is replaced.
        studies: Searches; one without trials is left out.
    Raises:
        StorageError: If it cannot be written.
    """
    import optuna

    if path.exists() and not path.is_file():  # replacing a folder or a device is refused
        raise StorageError(f"cannot write {path}: it is there and no file\n"
                           "  next: name a file")
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".kgen-") as folder:
            whole = Path(folder) / path.name
            storage = _storage(whole)
            count = sum(_write(storage, study) for study in studies if study.search.trials)
            if isinstance(storage, optuna.storages.RDBStorage):
                storage.remove_session()
                storage.engine.dispose()
            whole.touch()
            whole.replace(path)
    except OSError as problem:
        raise StorageError(f"cannot write {path}: {problem.strerror or problem}") from None
    finally:
        optuna.logging.set_verbosity(verbosity)
    return count


def _storage(path: Path) -> optuna.storages.BaseStorage:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if path.suffix in _SQLITE:
        return optuna.storages.RDBStorage(f"sqlite:///{path}")
    return JournalStorage(JournalFileBackend(str(path)))


def _write(storage: optuna.storages.BaseStorage, of: StudyOf) -> int:
    import optuna

    study = optuna.create_study(storage=storage, study_name=of.name, direction="minimize")
    for name, value in of.facts.items():
        study.set_user_attr(name, value)
    distributions = distributions_of(of.search.trials)
    spans = spans_of(of.search.trials)
    study.add_trials(
        _trial(number, record, distributions, span)
        for number, (record, span) in enumerate(zip(of.search.trials, spans, strict=True))
    )
    return len(of.search.trials)


def distributions_of(records: Sequence[Record]) -> dict[str, BaseDistribution]:
    """One distribution per parameter over all variants: numbers are ordered, others are names."""
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    values: dict[str, dict[tuple[type, Value], Value]] = {}
    for record in records:
        for name, value in ((VARIANT, record.config.variant), *record.config.values):
            values.setdefault(name, {})[type(value), value] = value  # by type too: True == 1
    found: dict[str, BaseDistribution] = {}
    for name, known in values.items():
        seen = list(known.values())
        numbers = [v for v in seen if not isinstance(v, bool | str)]
        if len(numbers) != len(seen):
            found[name] = CategoricalDistribution(sorted(seen, key=lambda v: (str(type(v)), v)))
            continue
        low, high = min(numbers), max(numbers)
        log = low > 0 and high >= _LOG_FROM * low
        if all(isinstance(v, int) for v in numbers):
            found[name] = IntDistribution(int(low), int(high), log=log)
        else:
            found[name] = FloatDistribution(float(low), float(high), log=log)
    return found


def spans_of(records: Iterable[Record]) -> list[tuple[datetime, datetime] | None]:
    """Begin and end of each trial.

    The journal has the end of a trial. A device runs one trial at a time, so a trial begins when
    the previous trial ends. The first trial of a tune is assumed to take the median duration of
    all others.
    """
    ends = [datetime.fromisoformat(r.when) if r.when else None for r in records]
    gaps: list[float | None] = [None] * len(ends)
    for i in range(1, len(ends)):
        before, end = ends[i - 1], ends[i]
        if before is not None and end is not None:
            seconds = (end - before).total_seconds()
            gaps[i] = seconds if 0 <= seconds <= _PAUSE_S else None
    usual = median([g for g in gaps if g is not None] or [0.0])
    return [
        None if end is None else (end - timedelta(seconds=usual if gap is None else gap), end)
        for end, gap in zip(ends, gaps, strict=True)
    ]


def _trial(
    number: int,
    record: Record,
    distributions: Mapping[str, BaseDistribution],
    span: tuple[datetime, datetime] | None,
) -> optuna.trial.FrozenTrial:
    from optuna.trial import FrozenTrial, TrialState

    timed = record.timing is not None and record.fate is Fate.VERIFIED
    params: dict[str, Value] = {VARIANT: record.config.variant, **record.config.as_dict()}
    facts: dict[str, object] = {"fate": record.fate.value, "record": record.id}
    if record.reason:
        facts["reason"] = record.reason
    for kernel, used in record.resources:
        facts[f"{kernel}: registers"] = used.registers
        facts[f"{kernel}: spilled bytes"] = used.spill_bytes
    if record.timing is not None:
        facts["quartiles_us"] = [record.timing.low_us, record.timing.high_us]
    # Optuna stores local time without a time zone.
    start, end = (t.astimezone().replace(tzinfo=None) for t in span) if span else (None, None)
    return FrozenTrial(
        number=number,
        trial_id=number,
        state=TrialState.COMPLETE if timed else TrialState.FAIL,
        value=record.timing.median_us if timed and record.timing else None,
        datetime_start=start or datetime.now(),
        datetime_complete=end or datetime.now(),
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs=facts,
        system_attrs={},
        intermediate_values={},
    )
