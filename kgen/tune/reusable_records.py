"""Reuse the records of earlier tunes from the journal."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kgen.errors import KgenError, SpaceError
from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.trial import Session

# A certificate's message gives its own limit first, then the limit of a trial.
_NO_ANSWER = re.compile(r"no answer within ([0-9.]+) s(?:.* limit of a trial, ([0-9.]+) s)?")


@dataclass(frozen=True)
class ReusableRecords:
    """The records of a problem, by how they can be reused.

    Attributes:
        valid: Newest record of each config whose rendered text is unchanged.
        other_text: Configs whose text has changed since their record. A build shows whether the
            machine code has changed as well. Those with the fastest record come first.
        by_code: Newest record of each machine-code key, over all configs.
        not_reused: How many records are not used, by reason.
    """

    valid: dict[Config, Record]
    other_text: tuple[Config, ...]
    by_code: dict[str, Record]
    not_reused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CurrentDigests:
    """The current keys and digests that a record must have to be reused.

    Attributes:
        definition: Digest of the operator's definition and inputs.
        guards: Digest of the calls that a config's variant admits.
        trial_s: Time limit of a trial, seconds.
    """

    definition: str
    guards: Callable[[Config], str]
    trial_s: float

    def why_not_reusable(self, record: Record) -> str:
        """The reason why a record cannot replace a trial now; empty if it can.

        An old record without digests is reused if it is verified. If it is not verified, the cause
        may be an error in a definition that has been corrected.
        """
        if record.fate is Fate.TIMED_OUT:
            limit_s = _NO_ANSWER.search(record.reason)
            if limit_s and float(limit_s[2] or limit_s[1]) < self.trial_s:
                return f"timed out within less than the current limit of {self.trial_s:g} s"
        if record.fate not in (Fate.VERIFIED, Fate.WRONG, Fate.CRASHED, Fate.TIMED_OUT):
            return ""
        if not record.definition:
            if record.fate in (Fate.WRONG, Fate.CRASHED):
                return "wrong or crashed, recorded without a digest of the definition"
            return ""
        if record.definition != self.definition:
            return "recorded with another definition or other inputs"
        try:
            guards = self.guards(record.config)
        except SpaceError:  # no guards to compare; another config may have the same machine code
            return "recorded with a variant that the search space no longer has"
        return "recorded with other guards of the variant" if record.guards != guards else ""


def reusable_records(
    records: Iterable[Record],
    feasible: set[Config],
    text_key_of: Callable[[Config], str],
    retry: bool = False,
    current: CurrentDigests | None = None,
) -> ReusableRecords:
    """Sort the records of a problem by how they can be reused.

    A journal may hold a config under several keys, for instance timed with cold and with warm L2.
    Records of configs that crashed or hung are reused too: trying one again would cost a worker.

    Args:
        records: The records of the problem, oldest first.
        feasible: The configs of its space.
        text_key_of: Returns the `text_key` that a new record of a config would have.
        retry: Ignore records of configs that crashed or hung, so that they are tried again.
        current: Ignore records of another definition or other guards; None: compare neither.
    """
    of_config: dict[Config, dict[str, Record]] = {}
    by_code: dict[str, Record] = {}
    for record in records:
        if record.config in feasible:
            of_config.setdefault(record.config, {})[record.text_key] = record
        if record.key:
            by_code[record.key] = record
    not_reused: Counter[str] = Counter()
    if current is not None:
        newest = [record for by_text in of_config.values() for record in by_text.values()]
        not_reused.update(why for record in newest if (why := current.why_not_reusable(record)))
        of_config = {
            config: kept
            for config, by_text in of_config.items()
            if (kept := {k: r for k, r in by_text.items() if not current.why_not_reusable(r)})
        }
        by_code = {key: r for key, r in by_code.items() if not current.why_not_reusable(r)}
    valid: dict[Config, Record] = {}
    other_text: list[Config] = []
    for config, by_text in of_config.items():
        try:
            found = by_text.get(text_key_of(config))
        except KgenError:
            continue  # the search reports a template that no longer renders
        if found is not None:
            if not (retry and _is_quarantined(found)):
                valid[config] = found
        elif any(record.key for record in by_text.values()):
            other_text.append(config)
    if retry:
        by_code = {key: r for key, r in by_code.items() if not _is_quarantined(r)}
    other_text.sort(key=lambda config: min(map(_time_us, of_config[config].values())))
    return ReusableRecords(valid, tuple(other_text), by_code, dict(not_reused))


def reuse_records(
    session: Session, problem: Problem, known: ReusableRecords, most: int, deadline: float | None
) -> Iterator[Record]:
    """Build configs whose text has changed, and yield the records of those whose code has not.

    The device is idle meanwhile, so the configs with the fastest records come first. Configs that
    are not built by the deadline are built when the search proposes them.

    Args:
        session: The session of the tune; appends each record to the journal again, with the new
            text.
        problem: The problem of the records.
        known: Records of the problem.
        most: Largest number of configs.
        deadline: Time limit on the clock of `time.monotonic`; None: no limit.
    """
    builds = []
    for config in known.other_text[: max(0, most)]:
        rendered = session.render(config, problem)
        builds.append((config, rendered, session.build(rendered)))
    for config, rendered, build in builds:
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            built = build.result(left_s)
        except TimeoutError:
            for _, _, other in builds:
                other.cancel()
            return
        if isinstance(built, BuildFailure):
            continue
        found = known.by_code.get(session.key(rendered, built, config, problem))
        if found is not None:
            yield session.renew(found, config, problem, rendered)


def _time_us(record: Record) -> float:
    return record.timing.median_us if record.timing else math.inf


def _is_quarantined(record: Record) -> bool:
    """Whether the machine, or a limit that has been raised since, may have caused the fate."""
    if record.fate is Fate.BUILD_FAILED:
        return "(limit on compile" in record.reason
    return record.fate in (Fate.CRASHED, Fate.TIMED_OUT)
