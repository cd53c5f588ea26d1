"""The queue of built candidates. The worker takes the one of the highest priority."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from kgen.worker import Candidate, TrialOutcome

Place: TypeAlias = tuple[int, ...]


class TrialQueue:
    """One thread that runs trials one after the other. Use as a context manager.

    Leaving the block waits for all trials that are not cancelled. The thread chooses the next trial
    when the worker is free, so a config that compiled early does not run before a more promising
    one.
    """

    def __init__(self, run: Callable[[Candidate], TrialOutcome]) -> None:
        """Create the queue; the thread calls `run` for each trial."""
        self._run = run
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kgen-trial")
        self._lock = threading.Lock()
        self._waiting: list[tuple[Place, int, Candidate, Future[TrialOutcome]]] = []
        self._count = 0  # breaks ties: candidates have no order

    def __enter__(self) -> TrialQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def add(self, place: Place, candidate: Candidate) -> Future[TrialOutcome]:
        """Queue a candidate; the smallest place runs next.

        The future may be cancelled until the trial runs.
        """
        future: Future[TrialOutcome] = Future()
        with self._lock:
            self._count += 1
            heapq.heappush(self._waiting, (place, self._count, candidate, future))
        self._pool.submit(self._next)  # one call of `_next` per candidate
        return future

    def _next(self) -> None:
        with self._lock:
            _, _, candidate, future = heapq.heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._run(candidate))
        except BaseException as error:  # re-raised where the outcome is awaited
            future.set_exception(error)
