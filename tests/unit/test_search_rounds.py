"""Equal requests propose equal trials, however long builds and trials take."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from search_fakes import PROBLEM, FakeSession
from test_search_loop import search

from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Timing
from kgen.search.study import Proposal, Search
from kgen.tune.builds_ahead import Build
from kgen.tune.rounds import IN_FLIGHT, ROUND, Rounds
from kgen.tune.warm_start import WarmStart
from kgen.worker import TrialOutcome

FAST = [Config.of("fast", {"x": x, "y": y}) for x in range(12) for y in range(12)]
POOR = [Config.of("poor", {"x": x}) for x in range(2 * ROUND)]
SAFE = [Config.of("safe", {"x": x}) for x in range(4)]


def recorded_us(config: Config) -> float | None:
    """The recorded time of a config; None for one that does not build."""
    values = {name: int(str(value)) for name, value in config.values}
    if config.variant == "poor":
        return 5000.0 + values["x"]
    if config.variant == "safe":
        return 900.0 + values["x"]
    if values["x"] == 11:
        return None
    return 10.0 + (values["x"] - 7) ** 2 + 0.5 * (values["y"] - 3) ** 2


class DelayedSession(FakeSession):
    """Recorded times; how long builds and trials take is drawn from a seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, {})
        self._rng = random.Random(seed)

    def render(self, config: Config, problem: Problem) -> Rendered:
        return Rendered("op", "", config.label)

    def build(self, rendered: Rendered) -> Build:
        name = rendered.digest
        self.builds.append(name)
        build: Build = Build()
        config = next(c for c in (*FAST, *POOR, *SAFE) if c.label == name)
        done: Artifact | BuildFailure = Artifact("cubin", name, name, (), 0.5)
        if recorded_us(config) is None:
            done = BuildFailure(name, "error: broken", "", 0.0)

        def end() -> None:
            if build.set_running_or_notify_cancel():
                build.set_result(done)

        threading.Timer(self._rng.choice((0.0, 0.002, 0.03)), end).start()
        return build

    def run(
        self,
        candidate: Any,
        problem: Problem,
        *,
        give_up_above_us: float | None = None,
        trained_below_us: float | None = None,
    ) -> TrialOutcome:
        self.trials.append(candidate.config)
        time.sleep(self._rng.choice((0.0, 0.001, 0.008)))
        us = recorded_us(candidate.config)
        assert us is not None
        return TrialOutcome(Fate.VERIFIED, timing=Timing(us, us, us, 1, ""))


def proposed(folder: Path) -> list[tuple[str, str]]:
    """Every proposal of the study in order, with its outcome."""
    storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
    (summary,) = optuna.get_all_study_summaries(storage)
    trials = optuna.load_study(study_name=summary.study_name, storage=storage).trials
    return [(str(trial.params), str(trial.user_attrs["fate"])) for trial in trials]


def test_the_same_seed_proposes_the_same_trials_whatever_the_timing(tmp_path: Path) -> None:
    first = WarmStart((FAST[0], *POOR, FAST[1], SAFE[0]), "safe")
    ran, seen = [], []
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        session = DelayedSession(folder, seed)
        state = search(folder, session, [*FAST, *POOR, *SAFE], first, 90)
        assert state.best_us is not None
        assert state.best_us < 12.0  # the model has learnt from the times
        ran.append([config.label for config in session.trials])
        seen.append(proposed(folder))
    assert len({tuple(labels) for labels in ran}) == 3  # the delays matter
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) >= 90
    assert "passed over" in {fate for _, fate in seen[0]}


class FakeStudy:
    """Proposes the configs of `FAST` in order, and notes what it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._next = 0

    def ask(self, n: int) -> list[Proposal]:
        configs = (*FAST, *POOR, *SAFE)[self._next : self._next + n]
        proposals = [Proposal(self._next + i, config) for i, config in enumerate(configs)]
        self._next += len(proposals)
        self.calls.append(f"ask {len(proposals)}")
        return proposals

    def tell(self, number: int, median_us: float | None, fate: str) -> None:
        self.calls.append(f"tell {number}")

    def release(self, number: int) -> None:
        self.calls.append(f"release {number}")


def rounds_of(study: FakeStudy, fallback: str = "") -> Rounds:
    real: Any = study
    made: Search = real
    return Rounds(made, [], WarmStart((), fallback), trials=1000)


def record_of(session: FakeSession, proposal: Proposal) -> Any:
    us = 50.0
    timing = Timing(us, us, us, 1, "")
    rendered = Rendered("op", "", proposal.config.label)
    outcome = TrialOutcome(Fate.VERIFIED, timing=timing)
    return session.record(proposal.config, PROBLEM, rendered, outcome)


def test_a_round_is_told_whole_and_in_order_of_proposal(tmp_path: Path) -> None:
    study, session = FakeStudy(), FakeSession(tmp_path, {})
    rounds = rounds_of(study)
    asked: list[Proposal] = []
    while rounds.settle(ending=False):
        asked += rounds.ask(1000)
    assert study.calls == [f"ask {ROUND}"] * IN_FLIGHT
    for proposal in reversed(asked[1:]):
        rounds.finish(proposal, record_of(session, proposal))
        assert not rounds.settle(ending=False)  # the first proposal has no result
    rounds.finish(asked[0], record_of(session, asked[0]))
    study.calls.clear()
    assert rounds.settle(ending=False)
    assert study.calls == [f"tell {number}" for number in range(ROUND)]  # not the later rounds
    assert set(rounds.told.records) == {p.config for p in asked[:ROUND]}


def test_no_round_waits_for_the_fallback_and_its_results_come_last(tmp_path: Path) -> None:
    study, session = FakeStudy(), FakeSession(tmp_path, {})
    rounds = rounds_of(study, fallback="fast")
    asked = rounds.ask(ROUND)
    assert [rounds.is_deferred(proposal) for proposal in asked] == [False, *[True] * (ROUND - 1)]
    for proposal in asked:
        rounds.finish(proposal, record_of(session, proposal))
    assert rounds.settle(ending=True)
    assert study.calls[1:] == ["tell 0"]
    assert rounds.settle(ending=True)
    assert study.calls[2:] == [f"tell {number}" for number in range(1, ROUND)]
    assert not rounds.settle(ending=True)


@pytest.mark.parametrize("known", [0, 3])
def test_a_search_that_is_closed_tells_what_it_knows(tmp_path: Path, known: int) -> None:
    study, session = FakeStudy(), FakeSession(tmp_path, {})
    rounds = rounds_of(study)
    asked = rounds.ask(ROUND)
    for proposal in asked[1 : 1 + known]:
        rounds.finish(proposal, record_of(session, proposal))
    rounds.close()
    assert study.calls[1:] == [f"tell {number}" for number in range(1, 1 + known)]
