"""Host runs of winners go on during the search; a refused winner is replaced by the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import StorageError, TuneError
from kgen.journal import Journal
from kgen.model.artifact import Artifact, BuildFailure, Rendered
from kgen.model.config import Config
from kgen.model.plan import Plan
from kgen.model.problem import Problem
from kgen.model.record import Evidence, Fate, Record, Timing
from kgen.model.space import Variant
from kgen.trial import HostRunner, HostRunResult, Session
from kgen.tune.confirmation import Confirmations
from kgen.tune.events import ProblemConfirmed, TuneEvent
from kgen.tune.results import Finalist, PassResult, ProblemResult
from kgen.worker import TrialOutcome

ENTRY = open_catalogue().entry("rmsnorm")
VARIANT = ENTRY.space.of_pass("forward")[0]
TIMING = Timing(1.0, 1.0, 1.0, 1, "")
EVENT = ProblemConfirmed(cast("PassResult", None))


class FakeHostRunner:
    """Host runs that end when the test says so; by config."""

    def __init__(self) -> None:
        self.runs: dict[str, Future[HostRunResult]] = {}
        self.started: list[str] = []

    def start(
        self, rendered: Rendered, variant: object, config: Config, *_: object
    ) -> Future[HostRunResult]:
        assert rendered.digest not in self.started, "a host run was started twice"
        self.started.append(rendered.digest)
        return self.runs.setdefault(rendered.digest, Future())

    def end(self, name: str, fault: str = "") -> None:
        """Started or not."""
        self.runs.setdefault(name, Future()).set_result(HostRunResult(fault=fault))


class FakeSession:
    """Keeps the records that are written."""

    entry = ENTRY
    pass_name = "forward"
    gpu = profile_named("h200")
    journal = Journal(Path("h200.trials.jsonl"))

    def __init__(self) -> None:
        self.written: list[tuple[str, Fate]] = []

    def render(self, config: Config, problem: Problem) -> Rendered:
        return Rendered("", "", f"{chr(problem.dims[0][1])}{config.as_dict()['place']}")

    def build(self, rendered: Rendered) -> Future[Artifact | BuildFailure]:
        built: Future[Artifact | BuildFailure] = Future()
        if rendered.digest == "z0":
            built.set_result(BuildFailure("", "", "", 0.0))
        else:
            built.set_result(Artifact("cubin", "", "", (), 0.0))
        return built

    def certificate(self, *_: object) -> None:
        return None

    def variant_of(self, config: Config) -> Variant:
        return VARIANT

    def record(
        self,
        config: Config,
        problem: Problem,
        rendered: Rendered,
        outcome: TrialOutcome,
        artifact: Artifact,
    ) -> Record:
        self.written.append((rendered.digest, outcome.fate))
        return certificate(rendered.digest, config)


def certificate(name: str, config: Config) -> Record:
    evidence = Evidence(0, (), (), 4, True)
    return Record(
        name, "rmsnorm", "forward", "", "h200", config, Fate.VERIFIED, evidence=evidence
    )


def problem(name: str, finalists: int = 2, first: int = 0) -> ProblemResult:
    """A problem `a` whose finalists are `a0`, `a1`, best first; they count from `first`."""
    found = []
    for i in range(first, first + finalists):
        config = Config.of(VARIANT.name, {"place": i})
        rendered = Rendered("", "", f"{name}{i}")
        artifact = Artifact("cubin", "", "", (), 0.0)
        record = certificate(rendered.digest, config)
        found.append(
            Finalist(VARIANT, config, Plan((), ()), rendered, artifact, record, TIMING, None)
        )
    return ProblemResult(
        problem=Problem((("M", ord(name)),), ()),
        finalists=tuple(found),
        peers={},
        peer_errors={},
        clocks={},
        space_size=2,
        feasible=2,
        refusals=(),
        fates={Fate.VERIFIED: finalists},
        reasons={},
        floor_us=1.0,
        search_s=0.0,
        compile_s=0.0,
        new_trials=0,
    )


@pytest.fixture
def made() -> tuple[Confirmations, FakeHostRunner, FakeSession, list[list[str]]]:
    host_runner, session = FakeHostRunner(), FakeSession()
    said: list[list[str]] = []

    def confirmed_event(confirmed: tuple[ProblemResult, ...]) -> TuneEvent:
        said.append([r.winner.rendered.digest for r in confirmed])
        return EVENT

    confirmations = Confirmations(
        cast("Session", cast("Any", session)),
        cast("HostRunner", cast("Any", host_runner)),
        confirmed_event,
    )
    return confirmations, host_runner, session, said


FinalsAgain = Callable[[ProblemResult], Generator[TuneEvent, None, ProblemResult]]


def finished(
    confirmations: Confirmations, finals_again: FinalsAgain
) -> tuple[ProblemResult, ...]:
    """What `finish` returns, once its events are read."""
    events = confirmations.finish(finals_again)
    while True:
        try:
            next(events)
        except StopIteration as end:
            return cast("tuple[ProblemResult, ...]", end.value)


def nobody_left(refused: ProblemResult) -> Generator[TuneEvent, None, ProblemResult]:
    """Finals again when all verified configs have been refused."""
    yield EVENT
    raise TuneError(f"{refused.problem}: no config was verified")


Made: TypeAlias = tuple[Confirmations, FakeHostRunner, FakeSession, list[list[str]]]


def test_what_is_proven_is_settled_without_waiting_for_the_rest(made: Made) -> None:
    confirmations, host_runner, session, said = made
    confirmations.add(problem("a"))
    confirmations.add(problem("b"))
    list(confirmations.advance())
    assert said == []
    host_runner.end("b0")
    list(confirmations.advance())
    list(confirmations.advance())
    assert said == [["b0"]]
    host_runner.end("a0")
    assert [r.winner.rendered.digest for r in finished(confirmations, nobody_left)] == ["a0", "b0"]
    assert said == [["b0"], ["a0", "b0"]], "in the order of the tune"
    assert session.written == [("b0", Fate.VERIFIED), ("a0", Fate.VERIFIED)]


def test_a_slow_host_run_holds_nobody_back_at_the_end(made: Made) -> None:
    confirmations, host_runner, _, said = made
    confirmations.add(problem("a"))
    confirmations.add(problem("b"))
    finishing = threading.Thread(
        target=finished, args=(confirmations, nobody_left), daemon=True
    )
    finishing.start()
    host_runner.end("b0")
    for _ in range(500):
        if said:
            break
        finishing.join(0.02)
    assert said == [["b0"]], "waits for the first problem's host run"
    host_runner.end("a0")
    finishing.join(10)
    assert said == [["b0"], ["a0", "b0"]]


def test_a_refused_winner_gives_way_while_the_search_goes_on(made: Made) -> None:
    confirmations, host_runner, session, said = made
    confirmations.add(problem("a"))
    host_runner.end("a0", "a race\n  on the host")
    list(confirmations.advance())  # must not wait for the next one's host run
    assert said == []
    assert host_runner.started == ["a0", "a1"]
    host_runner.end("a1")
    list(confirmations.advance())
    (result,) = confirmations.confirmed
    assert [f.rendered.digest for f in result.finalists] == ["a1"]
    assert result.fates == {Fate.VERIFIED: 1, Fate.WRONG: 1}
    assert result.reasons == {"wrong: a race": 1}
    assert session.written == [("a0", Fate.WRONG), ("a1", Fate.VERIFIED)]


def test_a_problem_without_a_finalist_fails_after_the_others_are_settled(made: Made) -> None:
    confirmations, host_runner, _, said = made
    confirmations.add(problem("a", finalists=1))
    confirmations.add(problem("b"))
    host_runner.end("a0", "a race")
    list(confirmations.advance())
    host_runner.end("b0")
    with pytest.raises(TuneError, match="every finalist was refused by its host run") as caught:
        finished(confirmations, nobody_left)
    assert "a race" in str(caught.value)
    assert said == [["b0"]]


def test_who_has_lost_all_finalists_plays_again_until_one_is_not_refused(made: Made) -> None:
    confirmations, host_runner, session, said = made
    asked: list[str] = []

    def finals_again(refused: ProblemResult) -> Generator[TuneEvent, None, ProblemResult]:
        number = len(asked) + 1
        asked.append(str(refused.problem))
        again = problem("a", finalists=1, first=number)
        host_runner.end(f"a{number}", "another race" if number == 1 else "")
        yield EVENT
        return replace(again, search_s=2.0, compile_s=0.5, new_trials=3)

    before = replace(problem("a", finalists=1), search_s=10.0, compile_s=4.0, new_trials=7)
    confirmations.add(before)
    confirmations.add(problem("b"))
    host_runner.end("a0", "a race")
    host_runner.end("b0")
    first, second = finished(confirmations, finals_again)
    assert asked == [str(first.problem)] * 2, "nobody else played again"
    assert [f.rendered.digest for f in first.finalists] == ["a2"]
    assert second.winner.rendered.digest == "b0"
    assert (first.search_s, first.compile_s, first.new_trials) == (14.0, 5.0, 13)
    assert said == [["b0"], ["a2", "b0"]], "the others did not wait for it"
    assert session.written == [
        ("a0", Fate.WRONG),
        ("b0", Fate.VERIFIED),
        ("a1", Fate.WRONG),
        ("a2", Fate.VERIFIED),
    ]


def test_what_could_not_be_used_yet_is_offered_again(made: Made) -> None:
    _, host_runner, session, _ = made
    offered: list[int] = []
    ready = False

    def confirmed_event(confirmed: tuple[ProblemResult, ...]) -> TuneEvent | None:
        offered.append(len(confirmed))
        return EVENT if ready else None

    confirmations = Confirmations(
        cast("Session", cast("Any", session)),
        cast("HostRunner", cast("Any", host_runner)),
        confirmed_event,
    )
    confirmations.add(problem("a"))
    host_runner.end("a0")
    list(confirmations.advance())
    assert offered == [1]
    ready = True  # nothing new is settled, and it is used all the same
    list(confirmations.advance())
    list(confirmations.advance())
    assert offered == [1, 1]


def test_a_host_run_that_cannot_be_built_costs_its_problem_alone(made: Made) -> None:
    """The cache's disk is full: the tune ends with that, after the others are confirmed."""
    confirmations, host_runner, _, said = made
    confirmations.add(problem("a", finalists=1))
    confirmations.add(problem("b"))
    host_runner.runs["a0"].set_exception(StorageError("No space left on device"))
    with pytest.raises(StorageError, match="No space left"):
        list(confirmations.advance())
    host_runner.end("b0")
    list(confirmations.advance(wait=True))  # what a tune does before it ends with the error
    assert said == [["b0"]]


def start_early(confirmations: Confirmations, name: str, place: int) -> None:
    config = Config.of(VARIANT.name, {"place": place})
    confirmations.start_early(problem(name).problem, certificate(f"{name}{place}", config))


def test_a_host_run_begins_before_finals_and_is_the_winners(made: Made) -> None:
    confirmations, host_runner, session, said = made
    start_early(confirmations, "a", 0)
    assert host_runner.started == ["a0"]
    assert confirmations.host_runs == []  # nothing waits for it before the finals
    host_runner.end("a0")
    confirmations.add(problem("a"))  # the fake runner refuses a second start
    assert list(confirmations.advance()) == [EVENT]
    assert said == [["a0"]]
    assert session.written == [("a0", Fate.VERIFIED)]


def test_a_leader_that_loses_its_finals_neither_confirms_nor_refuses(made: Made) -> None:
    confirmations, host_runner, session, said = made
    start_early(confirmations, "a", 1)
    host_runner.end("a1", fault="wrong")
    confirmations.add(problem("a"))  # a0 wins
    assert host_runner.started == ["a1", "a0"]
    assert (list(confirmations.advance()), session.written) == ([], [])
    host_runner.end("a0")
    assert list(confirmations.advance()) == [EVENT]
    assert (said, session.written) == ([["a0"]], [("a0", Fate.VERIFIED)])


def test_a_leader_that_loses_is_next_when_the_winner_is_refused(made: Made) -> None:
    confirmations, host_runner, session, said = made
    start_early(confirmations, "a", 1)
    host_runner.end("a1")
    confirmations.add(problem("a"))
    host_runner.end("a0", fault="wrong")
    assert list(confirmations.advance()) == [EVENT]
    assert (host_runner.started, said) == (["a1", "a0"], [["a1"]])
    assert session.written == [("a0", Fate.WRONG), ("a1", Fate.VERIFIED)]


def test_a_leader_of_another_problem_or_without_a_build_begins_nothing(made: Made) -> None:
    confirmations, host_runner, _, _ = made
    start_early(confirmations, "z", 0)
    assert host_runner.started == []
    start_early(confirmations, "b", 0)
    confirmations.add(problem("a"))
    assert host_runner.started == ["b0", "a0"]
