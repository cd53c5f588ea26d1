"""A tune by several processes: the shared study and journal, and the list of processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kgen.journal import RecordLog, SharedJournal
from kgen.model.digest import digest_of
from kgen.model.record import Record
from kgen.search.membership import Membership
from kgen.search.share import Share, share_of
from kgen.search.storage import open_storage
from kgen.trial import Session
from kgen.tune.request import SharedStorage, TuneRequest

if TYPE_CHECKING:
    import optuna

_MOST_AHEAD = 24


def _never() -> bool:
    return False


@dataclass
class Joint:
    """The joint work of this process with others.

    Attributes:
        shared: The storage that they share.
        storage: Holds the studies, the log of records, the member processes, and the tunes that
            want help.
        membership: This process among the others.
        is_tuner: Whether this process makes the finals: a search of a tuner waits until the others
            have finished their trials, and a worker goes on to the next problem.
        stop: Whether this process is to leave.
        device: Digest of the device model, once it is known. It keeps the times of different models
            apart that share a GPU profile.
        foreign: The records that other processes made while this one searched, by id.
    """

    shared: SharedStorage
    storage: optuna.storages.BaseStorage
    membership: Membership
    is_tuner: bool
    stop: Callable[[], bool] = _never
    device: str = field(default="", init=False)
    foreign: set[str] = field(default_factory=set, init=False)

    def share_journal(self, session: Session, request: TuneRequest) -> None:
        """Exchange the session's records with the others. Call it after `session.probe`."""
        facts = session.environment
        self.device = digest_of([session.gpu.name, facts.get("device"), facts.get("sms")])
        self.membership.publish("device", facts.get("device", ""))
        if self.shared.url.scheme == "journal":
            return  # processes of one host: the journal's file is shared itself
        problems = {
            (name, str(problem)) for name in request.passes for problem in request.problems[name]
        }

        def is_wanted(record: Record) -> bool:
            return (record.pass_name, record.problem) in problems

        name = f"{session.entry.operator.name}/{session.gpu.name}/{self.device}"
        log = RecordLog(self.storage, name)
        session.journal = SharedJournal(session.journal.path, log, is_wanted)

    def seed(self, seed: int) -> int:
        """The seed of this process's proposals: with equal seeds, processes propose the same
        configs.
        """
        return seed if self.is_tuner else seed + 1 + self.membership.number

    def at(self, study: str) -> None:
        """Publish the study that this process works on."""
        self.membership.publish("at", study)

    def ahead(self, study: str, wanted: int) -> int:
        """The number of proposals that this process may hold; limited so that none idles at the
        end.
        """
        return min(_MOST_AHEAD, max(2, wanted // (2 * (len(self._others(study)) + 1))))

    def share(self, study: str, wanted: int) -> Share:
        """The part of the free configs from which this process proposes."""
        others = self._others(study)
        place = sum(number < self.membership.number for number in others)
        return share_of(place, len(others) + 1, self.ahead(study, wanted))

    def _others(self, study: str) -> list[int]:
        """The join numbers of the other processes that work on a study."""
        return [
            member.number for member in self.membership.members()
            if member.facts.get("at") == study and member.id != self.membership.id
        ]


@contextmanager
def open_joint(
    request: TuneRequest, *, is_tuner: bool, stop: Callable[[], bool] = _never
) -> Iterator[Joint | None]:
    """Join the processes of the request's storage; None for a request without one.

    Raises:
        StorageError: If the storage cannot be opened.
    """
    if request.shared is None:
        yield None
        return
    storage = open_storage(request.shared.url, request.shared.patience_s)
    with join_members(storage, request.shared, request.gpu.name, request.ordinal) as membership:
        yield Joint(request.shared, storage, membership, is_tuner, stop)


def join_members(
    storage: optuna.storages.BaseStorage, shared: SharedStorage, gpu: str, ordinal: int
) -> Membership:
    """This process as a member of a storage, with the facts that it publishes; enter it to join."""
    beat_s = min(5.0, shared.grace_s / 4)
    return Membership(
        storage, {"gpu": gpu, "ordinal": ordinal}, beat_s=beat_s, grace_s=shared.grace_s
    )


class PeriodicTimer:
    """True at most once per period."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def __bool__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
