"""Builds of a problem's first trials, while the device is at something else.

A worker takes seconds to start, and finals and certificates take seconds of the device, during
which no search keeps the compiler busy. What the next search certainly begins with is built then.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TypeAlias

from kgen.errors import KgenError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.worker import Session

Build: TypeAlias = Future[Artifact | BuildFailure]


def builds_at_once() -> int:
    """Three of four cores: the others are for what finals and certificates build, and for the
    worker, which queues the launches that are being timed."""
    return max(1, len(os.sched_getaffinity(0)) * 3 // 4)


class Ahead:
    """Builds under way for a search that has not begun. Use as a context manager.

    A build is handed out once, so a failed one, which no cache keeps, is not repeated either.
    """

    def __init__(self, session: Session, at_once: int) -> None:
        """Start nothing yet.

        Args:
            session: Of the tune.
            at_once: Builds at once, at most.
        """
        self._session, self._at_once = session, at_once
        # Of what follows: a build that ends starts the next one, in a thread of the compiler.
        self._lock = threading.Lock()
        self._waiting: deque[Rendered] = deque()
        self._builds: dict[str, Build] = {}  # by digest of the source
        self._running = 0

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.forget()

    def start(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Build configs of a problem that the journal does not know, the first ones first.

        Takes the place of what was built ahead before. A template that does not render is left
        for the search to report.
        """
        self.forget()
        known = {r.key for r in self._session.journal.read() if r.problem == str(problem)}
        wanted: list[Rendered] = []
        for config in configs:
            try:
                rendered = self._session.render(config, problem)
                if self._session.key(rendered, config, problem) not in known:
                    wanted.append(rendered)
            except KgenError:
                break
        with self._lock:
            self._waiting.extend(wanted)
        self._go_on()

    def build(self, rendered: Rendered) -> Build:
        """The build of a source: the one that was started ahead, or else a new one."""
        with self._lock:
            build = self._builds.pop(rendered.digest, None)
        return self._session.build(rendered) if build is None else build

    def stop(self) -> None:
        """Start no more: the search has begun, and orders what it wants by itself."""
        with self._lock:
            self._waiting.clear()

    def forget(self) -> None:
        """Start no more, and cancel what nobody asked for as far as it has not begun."""
        self.stop()
        with self._lock:
            builds, self._builds = self._builds, {}
        for build in builds.values():  # outside the lock: a cancelled one says that it has ended
            build.cancel()

    def _go_on(self) -> None:
        while True:
            with self._lock:
                if not self._waiting or self._running >= self._at_once:
                    return
                rendered = self._waiting.popleft()
                self._running += 1
                build = self._builds[rendered.digest] = self._session.build(rendered)
            build.add_done_callback(self._ended)

    def _ended(self, build: Build) -> None:
        with self._lock:
            self._running -= 1
        self._go_on()
