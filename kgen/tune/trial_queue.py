"""What is built and waits for the worker: the best placed goes next, whenever it was built."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeAlias

from kgen.worker import Candidate, TrialOutcome

Place: TypeAlias = tuple[int, ...]


class TrialQueue:
    """One thread that runs trials, one after the other. Use as a context manager: leaving it
    waits for the trials that nobody cancelled.

    The choice is made when the worker is free, not when a build ends: what compiles fast must not
    stand in front of what is more promising.
    """

    def __init__(self, run: Callable[[Candidate], TrialOutcome]) -> None:
        """Start nothing yet; `run` is called in the thread."""
        self._run = run
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kgen-trial")
        self._lock = threading.Lock()
        self._waiting: list[tuple[Place, int, Candidate, Future[TrialOutcome]]] = []
        self._count = 0  # breaks ties: candidates have no order

    def __enter__(self) -> TrialQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True)

    def add(self, place: Place, candidate: Candidate) -> Future[TrialOutcome]:
        """Queue a candidate; the smallest place is next. Its future may be cancelled until it
        runs."""
        future: Future[TrialOutcome] = Future()
        with self._lock:
            self._count += 1
            heapq.heappush(self._waiting, (place, self._count, candidate, future))
        self._pool.submit(self._next)  # as many turns as candidates
        return future

    def _next(self) -> None:
        with self._lock:
            _, _, candidate, future = heapq.heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._run(candidate))
        except BaseException as error:  # whoever waits for the outcome raises it
            future.set_exception(error)
