"""A worker: it joins the tunes of a storage, searches their problems, and leaves at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import TypeAlias

from kgen.errors import StorageError, UserError
from kgen.search.storage import open_storage
from kgen.tune.agreement import Agreement, compare_devices
from kgen.tune.announcement import OpenTune, TuneSpec, is_open, open_tunes
from kgen.tune.builds_ahead import BuildsAhead, builds_at_once
from kgen.tune.engine import checked_spaces
from kgen.tune.events import TuneEvent
from kgen.tune.joint import Joint, PeriodicTimer, join_members
from kgen.tune.problem import ProblemTask, search_problem
from kgen.tune.request import SharedStorage, TuneRequest
from kgen.tune.session import open_session
from kgen.tune.warm_start import warm_start

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class TuneJoined:
    """The worker begins to help a tune; the events of its searches follow."""

    request: TuneRequest


@dataclass(frozen=True, slots=True)
class TuneLeft:
    """The worker has nothing more to do for a tune.

    Attributes:
        spec: The tune.
        why_not: Why the worker cannot help it; empty if it did.
    """

    spec: TuneSpec
    why_not: str = ""


HelpEvent: TypeAlias = TuneEvent | TuneJoined | TuneLeft | Agreement
# Makes the request of a spec for this machine; raises UserError if it cannot be made here.
OpenRequest: TypeAlias = Callable[[TuneSpec], AbstractContextManager[TuneRequest]]


def help_tunes(
    shared: SharedStorage,
    gpu: str,
    ordinal: int,
    open_request: OpenRequest,
    idle_s: float | None = None,
) -> Generator[HelpEvent, None, None]:
    """Help the tunes of a storage until there is nothing to do for `idle_s`.

    Closing the generator leaves: trials that run are finished, the others are freed.

    Args:
        shared: The storage.
        gpu: Name of this machine's profile.
        ordinal: CUDA device ordinal.
        open_request: Makes the request of a spec for this machine.
        idle_s: None: wait for ever.
    Raises:
        StorageError: If the storage cannot be opened, or does not answer for its patience.
        WorkerError: If the device cannot be used.
    """
    storage = open_storage(shared.url, shared.patience_s)
    with join_members(storage, shared, gpu, ordinal) as membership:
        done: set[int] = set()
        busy_at = time.monotonic()
        while idle_s is None or time.monotonic() - busy_at < idle_s:
            waiting = [
                tune
                for tune in open_tunes(storage)
                if tune.number not in done and _is_for(tune.spec, gpu)
            ]
            if not waiting:
                time.sleep(POLL_S)
                continue
            tune = waiting[0]
            done.add(tune.number)
            joint = Joint(shared, storage, membership, is_tuner=False, stop=_Ended(storage, tune))
            try:
                with open_request(tune.spec) as request:
                    yield TuneJoined(request)
                    yield from _help(request, joint)
            except StorageError:
                raise
            except UserError as problem:  # this machine lacks the operator or the problem
                yield TuneLeft(tune.spec, str(problem))
            else:
                yield TuneLeft(tune.spec)
            membership.publish("at", "")
            busy_at = time.monotonic()


class _Ended:
    """Whether a tune has ended; asks the storage at most every few seconds."""

    def __init__(self, storage: object, tune: OpenTune) -> None:
        self._storage, self._tune = storage, tune
        self._ask = PeriodicTimer(POLL_S)
        self._has_ended = False

    def __call__(self) -> bool:
        if not self._has_ended and self._ask:
            self._has_ended = not is_open(self._storage, self._tune)  # type: ignore[arg-type]
        return self._has_ended


def _is_for(spec: TuneSpec, gpu: str) -> bool:
    """Whether a machine with a GPU can help: the host only helps tunes of the host."""
    return spec.gpu == gpu or "host" not in (spec.gpu, gpu)


def _help(request: TuneRequest, joint: Joint) -> Iterator[TuneEvent | Agreement]:
    """Search the problems of a tune; each worker begins with a different problem."""
    variants = {name: request.entry.space.of_pass(name) for name in request.passes}
    agreement: Agreement | None = None
    for pass_name in request.passes:
        spaces = checked_spaces(request, pass_name)
        problems = request.problems[pass_name]
        with (
            open_session(request, pass_name) as (session, _),
            BuildsAhead(session, builds_at_once()) as builds_ahead,
        ):
            copy_gbps = session.probe()
            joint.share_journal(session, request)
            for step in range(len(problems)):
                place = (joint.membership.number + step) % len(problems)
                feasible = spaces[place]
                task = ProblemTask(
                    problems[place],
                    feasible,
                    warm_start(variants[pass_name], set(feasible.configs), ()),
                    deadline=None,
                    retry=request.retry,
                    joint=joint,
                )
                with closing(
                    search_problem(session, request, task, builds_ahead, copy_gbps)
                ) as events:
                    searched = yield from events
                if agreement is None:
                    agreement = compare_devices(session, problems[place], searched.state, joint)
                    if agreement is not None:
                        yield agreement
                if joint.stop():
                    return
