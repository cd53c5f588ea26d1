"""A session without compiler and device: the test decides when builds end, and sets the times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from kgen.catalogue import profile_named
from kgen.journal import Journal
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.plan import Plan
from kgen.model.problem import Problem
from kgen.model.record import RANDOM, TRAINED, Fate, Record, Timing
from kgen.trial import Session
from kgen.tune.builds_ahead import Build
from kgen.worker import TrialOutcome
from kgen.worker.inputs import slower_of

PROBLEM = Problem((("M", 8),), ())


def config(variant: str, place: int) -> Config:
    """The config of a variant with a given number."""
    return Config.of(variant, {"place": place})


class FakeSession:
    """Builds of the sources in `slow` end when the test lets them go; all others end at once, and
    so does a build that is requested again."""

    entry = SimpleNamespace(operator=SimpleNamespace(name="op"))
    pass_name = "forward"
    gpu = profile_named("h200")
    definition = ""
    trained = ""  # digest of the trained inputs; empty: the operator declares none

    def __init__(self, folder: Path, us: dict[str, float], slow: tuple[str, ...] = ()) -> None:
        self.journal = Journal(folder / "h200.trials.jsonl")
        self.us, self.slow = us, slow
        self.builds: list[str] = []
        self.trials: list[Config] = []
        self.examined: list[Config] = []
        self.give_up_above_us: list[float | None] = []
        self.us_trained: dict[str, float] = {}  # times of the variants that branch on values
        self.on_run: Callable[[Config], None] = lambda config: None
        self._waiting: list[tuple[Build, Artifact]] = []
        self._lock = threading.Lock()
        self.edition = ""  # suffix of all text keys; `code_edition` is that of all codes
        self.code_edition = ""

    def as_session(self) -> Session:
        """This object as a `Session`, for the type checker."""
        return cast("Session", cast("Any", self))

    def not_reused(self) -> None:
        """End the waiting builds, in the order in which they were requested."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for build, artifact in waiting:
            if build.set_running_or_notify_cancel():
                build.set_result(artifact)

    def cancelled(self) -> int:
        """Number of the waiting builds that were cancelled."""
        with self._lock:
            return sum(build.cancelled() for build, _ in self._waiting)

    @contextmanager
    def letting_go(self, after_cancelled: int = 0) -> Iterator[None]:
        """End builds soon after they are requested.

        Args:
            after_cancelled: No build ends before the search has cancelled this many builds. After
                10 s builds end in any case, so that a search that cancels none fails its test and
                ends.
        """
        over = threading.Event()
        latest = time.monotonic() + 10.0

        def go_on() -> None:
            is_awaited = after_cancelled > 0
            while not over.wait(0.05):
                is_awaited = (
                    is_awaited
                    and self.cancelled() < after_cancelled
                    and time.monotonic() < latest
                )
                if not is_awaited:
                    self.not_reused()

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def probe(self) -> float:
        self.built_at_probe = list(self.builds)
        return 1000.0

    def render(self, config: Config, problem: Problem) -> Rendered:
        of_another = "" if problem == PROBLEM else f" {problem}"
        return Rendered("op", "", f"{config.variant}{config.as_dict()['place']}{of_another}")

    def text_key(self, rendered: Rendered, config: Config, problem: Problem) -> str:
        return f"key of {rendered.digest}{self.edition}"

    def key(
        self, rendered: Rendered, artifact: Artifact, config: Config, problem: Problem
    ) -> str:
        return f"code of {rendered.digest}{self.code_edition}"

    def guards(self, config: Config) -> str:
        return ""

    def refusal(self, rendered: Rendered, artifact: Artifact, config: Config) -> str:
        """Never refuse: none of these kernels keeps state between launches."""
        self.examined.append(config)
        return ""

    def build(self, rendered: Rendered) -> Build:
        name = rendered.digest
        build: Build = Future()
        with self._lock:
            self.builds.append(name)
            is_new = self.builds.count(name) == 1
        if name.startswith("broken"):
            build.set_result(BuildFailure(name, "error: broken", "", 0.0))
        elif is_new and name.startswith(self.slow or ("nothing",)):
            with self._lock:
                self._waiting.append((build, Artifact("cubin", name, name, (), 5.0)))
        else:
            build.set_result(Artifact("cubin", name, name, (), 0.5))
        return build

    def plan(self, config: Config, problem: Problem) -> Plan:
        return Plan((), ())

    def candidate(self, config: Config, artifact: Artifact) -> Any:
        return SimpleNamespace(config=config, artifact=artifact)

    def code_identity(self, artifact: Artifact, plan: Plan) -> str:
        return artifact.path

    def run(
        self,
        candidate: Any,
        problem: Problem,
        *,
        give_up_above_us: float | None = None,
        trained_below_us: float | None = None,
    ) -> TrialOutcome:
        found = candidate.config
        self.trials.append(found)
        self.give_up_above_us.append(give_up_above_us)
        self.on_run(found)
        random = self.timing(found)
        too_slow = trained_below_us is not None and random.median_us > trained_below_us
        if not self.trained or too_slow:
            return TrialOutcome(Fate.VERIFIED, timing=random)
        us = self.us_trained.get(found.variant, random.median_us)
        timing = slower_of({RANDOM: random, TRAINED: Timing(us, us, us, 1, "")})
        return TrialOutcome(Fate.VERIFIED, timing=timing, trained=self.trained)

    def timing(self, config: Config) -> Timing:
        us = self.us[config.variant]
        return Timing(us, us, us, 1, "")

    def record(
        self,
        config: Config,
        problem: Problem,
        rendered: Rendered,
        outcome: TrialOutcome,
        artifact: Artifact | None = None,
    ) -> Record:
        record = Record(
            self.key(rendered, artifact, config, problem) if artifact else "",
            "op", "forward", str(problem), "h200", config, outcome.fate, outcome.reason,
            text_key=self.text_key(rendered, config, problem), timing=outcome.timing,
            trained=outcome.trained,
        )
        self.journal.append(record)
        return record

    def renew(
        self, record: Record, config: Config, problem: Problem, rendered: Rendered
    ) -> Record:
        found = replace(record, config=config, text_key=self.text_key(rendered, config, problem))
        self.journal.append(found)
        return found
