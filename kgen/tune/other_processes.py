"""The trials of other processes on the problem that this process searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.study import Search
from kgen.trial import Session
from kgen.tune.joint import Joint, PeriodicTimer
from kgen.tune.reusable_records import CurrentDigests, ReusableRecords
from kgen.tune.search_state import SearchState

POLL_S = 0.5  # poll interval for the trials of other processes


@dataclass(frozen=True)
class SharedSearch:
    """The part of a search that other processes see.

    Attributes:
        session: The session of the tune.
        problem: The problem.
        feasible: The problem's configs.
        study: The study of the problem.
        text_key_of: Returns the `text_key` that a record of a config has today.
        current: The digests that a record must have.
    """

    session: Session
    problem: Problem
    feasible: set[Config]
    study: Search
    text_key_of: Callable[[Config], str]
    current: CurrentDigests


class OtherProcesses:
    """The other processes of a joint search."""

    def __init__(self, joint: Joint, shared: SharedSearch, read_up_to: int) -> None:
        """Start to follow them.

        Args:
            joint: The work with them.
            shared: The search.
            read_up_to: Offset in the journal up to which the search knows the records.
        """
        self._joint, self._shared, self._read_up_to = joint, shared, read_up_to
        self._running = 0
        self._look_around = PeriodicTimer(POLL_S)

    def running(self, now: bool = False) -> int:
        """Number of trials that other processes run; releases the trials of dead processes.

        Args:
            now: Ask the storage even if it was asked just before.
        """
        if now or self._look_around:
            self._running = self._shared.study.running_elsewhere()
        return self._running

    def are_awaited(self) -> bool:
        """Whether a tuner must wait for other processes: their trials may end, or be released."""
        before = self._running
        waits = self._joint.is_tuner and not self._joint.stop()
        return waits and self.running(now=True) + before > 0

    def take_over(self, state: SearchState, known: ReusableRecords) -> Iterator[Record]:
        """Add new records of other processes, and yield those of configs without a record."""
        records, self._read_up_to = self._shared.session.journal.follow(self._read_up_to)
        for record in records:
            if not self._is_of_use(record):
                continue
            if record.key:
                known.by_code[record.key] = record
            mine = state.records.get(record.config)
            if mine is None:
                state.add(record)
                state.new_trials += 1
                self._joint.foreign.add(record.id)
                yield record
            elif mine.fate is Fate.VERIFIED and record.fate is not Fate.VERIFIED:
                state.certify(mine, record)  # refused in another process's finals

    def _is_of_use(self, record: Record) -> bool:
        """Whether a record belongs to this search and can replace a trial."""
        shared = self._shared
        return (
            record.problem == str(shared.problem)
            and record.pass_name == shared.session.pass_name
            and record.config in shared.feasible
            and not shared.current.why_not_reusable(record)
            and record.text_key == shared.text_key_of(record.config)
        )
