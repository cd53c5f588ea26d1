"""Build the warm-start configs of the next problem while the device works on something else.

A worker takes seconds to start, and finals and certificates occupy the device for seconds. The
compiler would be idle meanwhile, so it builds the configs that the next search will try first.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

from kgen.errors import KgenError
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.trial import Session

Build: TypeAlias = Future[Artifact | BuildFailure]


def builds_at_once() -> int:
    """Three quarters of the cores.

    The others build for finals and certificates, and run the worker that queues timed launches.
    """
    return max(1, len(os.sched_getaffinity(0)) * 3 // 4)


class BuildsAhead:
    """Builds for a search that has not begun. Use as a context manager.

    Each build is returned once, also a failed one, which no cache would keep.
    """

    def __init__(self, session: Session, at_once: int) -> None:
        """Create it; `start` begins the builds.

        Args:
            session: The session of the tune.
            at_once: Largest number of concurrent builds.
        """
        self._session, self._at_once = session, at_once
        # Guards the fields below: a finished build starts the next one in a thread of the compiler.
        self._lock = threading.Lock()
        self._waiting: deque[Rendered] = deque()
        self._builds: dict[str, Build] = {}  # by digest of the source
        self._running = 0

    def __enter__(self) -> BuildsAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def start(self, problem: Problem, configs: Sequence[Config]) -> None:
        """Build those configs of a problem that have no record in the journal, in order.

        Replaces earlier builds ahead. If a template does not render, the search will report it.
        """
        self.cancel()
        known = {r.text_key for r in self._session.journal.read() if r.problem == str(problem)}
        wanted: list[Rendered] = []
        for config in configs:
            try:
                rendered = self._session.render(config, problem)
                if self._session.text_key(rendered, config, problem) not in known:
                    wanted.append(rendered)
            except KgenError:
                break
        with self._lock:
            self._waiting.extend(wanted)
        self._start_builds()

    def build(self, rendered: Rendered) -> Build:
        """The build of a source: the one started ahead, or a new one."""
        with self._lock:
            build = self._builds.pop(rendered.digest, None)
        return self._session.build(rendered) if build is None else build

    def stop(self) -> None:
        """Start no more builds: the search has begun and orders its own builds."""
        with self._lock:
            self._waiting.clear()

    def cancel(self) -> None:
        """Start no more builds, and cancel unused ones that have not begun."""
        self.stop()
        with self._lock:
            builds, self._builds = self._builds, {}
        for build in builds.values():  # outside the lock: cancelling calls `_ended`
            build.cancel()

    def _start_builds(self) -> None:
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
        self._start_builds()
