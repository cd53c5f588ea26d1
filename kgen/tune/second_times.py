"""Times on the inputs of a trained model, for records that lack them.

A search times a config on trained inputs only if its time on random ones could make it a finalist.
Records of earlier tunes may lack the time on trained inputs, or the operator may have drawn these
inputs differently. Their recorded time is then a lower bound of the time that counts.
"""

from __future__ import annotations

import math
import time

from kgen.model.artifact import BuildFailure
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.trial import Session
from kgen.tune.search_state import SearchState

FINALISTS = 5
# Search times have a few per cent of noise. A config slower than this ratio cannot be the best.
FIELD_WIDTH = 1.15


def is_whole(session: Session, record: Record) -> bool:
    """Whether a record has times on all inputs that the operator declares today."""
    return record.trained == session.trained


def complete_times(
    session: Session,
    problem: Problem,
    state: SearchState,
    *,
    deadline: float | None = None,
    every: bool = False,
) -> int:
    """Time incomplete records again, on all inputs, until all finalists have complete records.

    A slower time may let other records into the finals, so the finalists are determined again after
    each trial.

    Args:
        session: The session of the tune; records the trials.
        problem: The problem of the records.
        state: The state of the search; gets the new records.
        deadline: When to stop, as of `time.monotonic`; None for never.
        every: Complete all verified records, not only the field of the finals.
    Returns:
        How many records were timed again.
    """
    failed: set[Config] = set()
    count = 0
    while deadline is None or time.monotonic() < deadline:
        ranking = [r for r in state.ranking() if r.config not in failed]
        field = ranking if every else _field(ranking)
        old = next((record for record in field if not is_whole(session, record)), None)
        if old is None:
            break
        if _time_again(session, problem, state, old):
            count += 1
        else:
            failed.add(old.config)
    return count


def _field(ranking: list[Record]) -> list[Record]:
    """The records that would take part in finals."""
    limit_us = FIELD_WIDTH * min((_us(record) for record in ranking), default=math.inf)
    return [record for record in ranking[:FINALISTS] if _us(record) <= limit_us]


def _us(record: Record) -> float:
    assert record.timing is not None
    return record.timing.median_us


def _time_again(session: Session, problem: Problem, state: SearchState, old: Record) -> bool:
    """Replace a record by a complete one; return False if the config no longer builds."""
    rendered = session.render(old.config, problem)
    built = session.build(rendered).result()
    if isinstance(built, BuildFailure) or session.refusal(rendered, built, old.config):
        return False  # the finals report why
    outcome = session.run(session.candidate(old.config, built), problem)
    record = session.record(old.config, problem, rendered, outcome, built)
    state.certify(old, record)
    return record.fate is not Fate.VERIFIED or is_whole(session, record)
