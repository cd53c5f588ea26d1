"""The order in which a search tries built configs, and the builds before the search begins."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from search_fakes import PROBLEM, FakeSession, config

from kgen.catalogue import open_catalogue, profile_named
from kgen.model.config import Config
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record
from kgen.search.feasible import Feasible
from kgen.trial import HostRunner, WorkerPool
from kgen.tune import engine, search_loop
from kgen.tune.builds_ahead import BuildsAhead
from kgen.tune.recorded_winners import EarlierRecords
from kgen.tune.request import Limits, TuneRequest
from kgen.tune.search_loop import ProblemSearch
from kgen.tune.search_state import SearchState
from kgen.tune.trial_queue import TrialQueue
from kgen.tune.warm_start import WarmStart, too_slow_variants, untried_variants, warm_start
from kgen.worker import TrialOutcome

A, B, SAFE = ([config(name, i) for i in range(3)] for name in ("a", "b", "safe"))


def search(
    folder: Path,
    session: FakeSession,
    feasible: list[Config],
    first: WarmStart,
    trials: int,
    ahead: BuildsAhead | None = None,
    time_s: float | None = None,
    overtime_s: float = search_loop.OVERTIME_S,
) -> SearchState:
    request = SimpleNamespace(
        study=folder / "study.log", seed=0, limits=Limits(), paths=(),
        journal=folder / "trials.jsonl", compiler=SimpleNamespace(name="host"),
    )
    made = session.as_session()
    search = ProblemSearch(
        made,
        cast("TuneRequest", cast("Any", request)),
        PROBLEM,
        Feasible(tuple(feasible), len(feasible), ()),
        first,
        ahead or BuildsAhead(made, 1),
        trials=trials,
        deadline=time_s,
        retry=False,
        overtime_s=overtime_s,
    )
    for _ in search.run():
        pass
    return search.state


def fates(folder: Path) -> dict[tuple[str, int], list[str]]:
    """The study's entry for each trial of each config."""
    storage = JournalStorage(JournalFileBackend(str(folder / "study.log")))
    (summary,) = optuna.get_all_study_summaries(storage)
    found: dict[tuple[str, int], list[str]] = {}
    for trial in optuna.load_study(study_name=summary.study_name, storage=storage).trials:
        variant = trial.params["variant"]
        where = (variant, trial.params[f"{variant}.place"])
        found.setdefault(where, []).append(trial.user_attrs["fate"])
    return found


def variant(name: str, first: list[Config], safe: Config | None = None) -> Any:
    """The variant `rows_in_registers` of rmsnorm under another name."""
    real = open_catalogue().entry("rmsnorm").space.of_pass("forward")[0]
    return replace(real, name=name, first=tuple(first), safe=safe)


def test_first_trials_visit_each_variant_then_go_by_the_order_of_the_space() -> None:
    variants = [variant("a", A), variant("b", B), variant("safe", [], SAFE[0])]
    allowed = {*A, *B, *SAFE}
    first = warm_start(variants, allowed, [])
    assert first == WarmStart((A[0], B[0], *A[1:], *B[1:], SAFE[0]), "safe")
    assert warm_start(variants, {*A[1:], SAFE[0]}, []).configs == (*A[1:], SAFE[0])
    likely = warm_start(variants, allowed, [B[2], config("gone", 0), B[2]])
    assert likely.configs == (B[2], A[0], B[0], *A[1:], B[1], SAFE[0])


def test_a_safe_variant_that_won_or_is_listed_first_is_no_last_resort() -> None:
    safe = variant("safe", [], SAFE[0])
    won = warm_start([variant("a", A), safe], {*A, *SAFE}, [SAFE[1]])
    assert won == WarmStart((SAFE[1], A[0], SAFE[0], *A[1:]), "")
    assert warm_start([safe, variant("a", A)], {*A, *SAFE}, []).fallback == ""


def record_of(config: Config, session: FakeSession) -> Record:
    rendered = session.render(config, PROBLEM)
    return session.record(
        config,
        PROBLEM,
        rendered,
        TrialOutcome(Fate.VERIFIED, timing=session.timing(config)),
    )


def test_a_variant_is_outclassed_after_two_trials_ten_times_too_slow(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "b": 101.0, "c": 99.0})
    a, b0, b1 = (record_of(c, session) for c in (A[0], B[0], B[1]))
    c = [record_of(config("c", i), session) for i in range(2)]
    assert too_slow_variants([]) == set()
    assert too_slow_variants([a, *c, b0]) == set()
    assert too_slow_variants([a, *c, b0, b1]) == {"b"}
    assert too_slow_variants([b0, b1]) == set()


def test_the_queue_runs_the_best_placed_that_is_there() -> None:
    begun, go = threading.Event(), threading.Event()
    ran: list[str] = []

    def run(candidate: Any) -> TrialOutcome:
        ran.append(candidate)
        begun.set()
        assert go.wait(10)
        if candidate == "bad":
            raise ValueError("bad")
        return TrialOutcome(Fate.VERIFIED)

    with TrialQueue(run) as queue:
        queue.add((1, 0), cast("Any", "safe"))
        assert begun.wait(10)
        places = {"late": (1, 1), "gone": (0, 3), "bad": (0, 2), "soon": (0, 1)}
        late, gone, bad, soon = (
            queue.add(place, cast("Any", name)) for name, place in places.items()
        )
        assert gone.cancel()
        go.set()
    assert ran == ["safe", "soon", "bad", "late"]
    assert soon.result() == late.result() == TrialOutcome(Fate.VERIFIED)
    with pytest.raises(ValueError, match="bad"):
        bad.result()


def test_the_fallback_waits_for_slow_builds_and_is_tried_once_before_the_end(
    tmp_path: Path,
) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "safe": 9000.0}, slow=("a",))
    with session.letting_go():
        search(tmp_path, session, [*A, *SAFE], WarmStart((*A, SAFE[0]), "safe"), 6)
    assert session.trials[:4] == [*A, SAFE[0]]
    assert set(session.trials[4:]) == set(SAFE[1:])
    assert session.give_up_above_us == [None, *[40.0] * 5]
    # However often the loop looks at a build that waits, its source and cubin are read once.
    assert sorted(map(str, session.examined)) == sorted(map(str, session.trials))


def test_the_device_does_not_idle_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_loop, "PATIENCE_S", 0.05)
    monkeypatch.setattr(search_loop, "HELD_POLL_S", 0.01)
    session = FakeSession(tmp_path, {"a": 10.0, "safe": 9000.0}, slow=("a",))

    def on_run(config: Config) -> None:
        if len(session.trials) == len(SAFE):
            session.not_reused()

    session.on_run = on_run
    search(tmp_path, session, [*A, *SAFE], WarmStart((*A, SAFE[0]), "safe"), 6)
    # Nothing else is verified meanwhile, so the fallback is the best, and all of it is tried.
    assert {c.variant for c in session.trials[:3]} == {"safe"}
    assert session.trials[3:] == A


def test_the_fallback_has_no_second_trial_while_there_is_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_loop, "PATIENCE_S", 0.0)
    session = FakeSession(tmp_path, {"a": 10.0, "safe": 9000.0}, slow=("a",))
    for known in (A[0], SAFE[0]):
        record_of(known, session)
    with session.letting_go():
        search(tmp_path, session, [*A, *SAFE], WarmStart((*A, SAFE[0]), "safe"), 6)
    assert session.trials[:2] == A[1:]
    assert set(session.trials[2:]) == set(SAFE[1:])


def test_a_broken_space_still_comes_to_the_fallback(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"safe": 9000.0})
    broken = [config("broken", i) for i in range(2)]
    first = WarmStart((*broken, SAFE[0]), "safe")
    state = search(tmp_path, session, [*broken, SAFE[0]], first, 10)
    assert session.trials == [SAFE[0]]
    assert state.fates == {Fate.BUILD_FAILED: 2, Fate.VERIFIED: 1}


def test_an_outclassed_variant_gets_no_more_first_trials(tmp_path: Path) -> None:
    """As known from the journal, so that nothing depends on what is in the queue already."""
    session = FakeSession(tmp_path, {"a": 10.0, "b": 500.0})
    more = [config(name, i) for name in "ab" for i in range(3, 6)]
    for known in (A[0], B[0], B[1]):
        record_of(known, session)
    first = WarmStart((B[2], more[3], A[1], A[2]))
    search(tmp_path, session, [*A, *B, *more], first, 5)
    assert session.trials == [A[1], A[2]]


def test_first_trials_of_a_variant_that_is_newer_than_all_results_are_on_top(
    tmp_path: Path,
) -> None:
    first = WarmStart((A[0], B[0], A[1], B[1], SAFE[0]), "safe")
    # Variant b has its first trial after the one config that is known.
    assert untried_variants(first, []) == untried_variants(first, [A[0]]) == set()
    assert untried_variants(first, [A[0], A[1]]) == {B[0], B[1]}
    assert untried_variants(first, [A[0], A[1], B[2]]) == set()
    session = FakeSession(tmp_path, {"a": 10.0, "b": 9.0, "safe": 9000.0})
    for known in A:
        record_of(known, session)
    feasible = [*A, *B, SAFE[0]]
    state = search(tmp_path, session, feasible, first, 3)
    assert session.trials == [B[0], B[1]]
    assert state.fates == {Fate.VERIFIED: 5}
    search(tmp_path, session, feasible, first, 3)
    assert session.trials == [B[0], B[1]]


def test_first_trials_under_way_are_given_back_and_may_be_proposed_again(tmp_path: Path) -> None:
    """The build of the last one never ends: it is in the second round, which begins before the
    first is over."""
    session = FakeSession(tmp_path, {"a": 10.0, "b": 500.0}, slow=("b9",))
    more = [config("b", i) for i in range(3, 10)]
    first = WarmStart((A[0], *B, *more))
    feasible = [A[0], *B, *more]
    state = search(tmp_path, session, feasible, first, 20)
    assert sorted(c.label for c in session.trials) == sorted(c.label for c in feasible)
    assert state.fates == {Fate.VERIFIED: len(feasible)}
    assert fates(tmp_path)["b", 9] == ["passed over", "verified"]


def test_what_was_built_ahead_is_not_built_again(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0}, slow=("a",))
    record_of(A[2], session)
    broken = config("broken", 0)
    with BuildsAhead(session.as_session(), 2) as ahead:
        ahead.start(PROBLEM, [broken, *A, config("a", 3)])
        assert session.builds == ["broken0", "a0", "a1"]  # two at once; one is known, one waits
        session.not_reused()
        assert session.builds == ["broken0", "a0", "a1", "a3"]
        feasible = [broken, *A, config("a", 3)]
        with session.letting_go():
            state = search(tmp_path, session, feasible, WarmStart((broken, *A)), 9, ahead)
    assert sorted(session.builds) == ["a0", "a1", "a3", "broken0"]
    assert state.fates == {Fate.VERIFIED: 4, Fate.BUILD_FAILED: 1}
    assert state.compile_s == 15.0


def test_a_tune_works_ahead_before_the_probe_and_before_finals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "b": 20.0})
    variants = [variant("a", A[:1]), variant("b", B[:1])]
    space = SimpleNamespace(of_pass=lambda name: variants)
    other = Problem((("M", 9),), ())
    request = SimpleNamespace(
        entry=SimpleNamespace(space=space), gpu=session.gpu, trials=9, pass_time_s=None,
        problems={"forward": (PROBLEM, other)}, retry=False, journal=tmp_path / "other.jsonl",
        served={}, certificates=(),
    )  # fmt: skip
    feasible = Feasible((*A, *B), 6, ())

    def tuned(*arguments: Any) -> Any:
        assert arguments[2].first.configs == (A[0], B[0])
        state = SearchState()
        state.add(record_of(B[2], session))
        arguments[-1](state)
        yield from ()
        return SimpleNamespace(winner=SimpleNamespace(config=B[2]))

    monkeypatch.setattr(engine, "tune_problem", tuned)
    with BuildsAhead(session.as_session(), 1) as ahead:
        tune = engine._PassTune(
            cast("TuneRequest", cast("Any", request)),
            [feasible, feasible],
            session.as_session(),
            cast("HostRunner", None),
            cast("WorkerPool", None),
            ahead,
            0.0,
        )
        assert session.built_at_probe == ["a0", "b0"]
        early: list[tuple[Problem, Config]] = []
        monkeypatch.setattr(
            tune._confirmations, "start_early", lambda p, record: early.append((p, record.config))
        )
        list(tune._tune_problem(0, share=2))
        assert early == [(PROBLEM, B[2])]  # its host run begins before the finals
        # The best so far, which is likely to win the finals, comes first.
        assert session.builds[2:] == ["b2 M=9", "a0 M=9", "b0 M=9"]
        tune._build_ahead(2)
        assert len(session.builds) == 5
        request.gpu = profile_named("host")
        list(tune._tune_problem(0, share=2))
        assert len(early) == 1  # a host run would disturb the timings of finals on the CPU


def tune_of_four(
    tmp_path: Path, session: FakeSession, ahead: BuildsAhead, pass_time_s: float
) -> engine._PassTune:
    """The tune of a pass with four problems."""
    variants = [variant("a", A[:1])]
    request = SimpleNamespace(
        entry=SimpleNamespace(space=SimpleNamespace(of_pass=lambda name: variants)),
        gpu=session.gpu, trials=9, pass_time_s=pass_time_s, problems={"forward": (PROBLEM,) * 4},
        retry=False, journal=tmp_path / "other.jsonl", served={},
        certificates=(tmp_path / "generated" / "h200.trials.jsonl",),
    )  # fmt: skip
    return engine._PassTune(
        cast("TuneRequest", cast("Any", request)),
        [Feasible(tuple(A), 3, ())] * 4,
        session.as_session(),
        cast("HostRunner", None),
        cast("WorkerPool", None),
        ahead,
        0.0,
    )


@pytest.mark.parametrize(("gpu", "others"), [("h200", ["generated"]), ("host", [])])
def test_a_tune_for_a_gpu_reads_the_winners_of_the_committed_library(
    gpu: str, others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def read(pass_name: str, own: Path, folders: list[Path]) -> EarlierRecords:
        asked.append((pass_name, own, [folder.name for folder in folders]))
        return EarlierRecords(pass_name, (), ())

    monkeypatch.setattr(EarlierRecords, "read", read)
    session = FakeSession(tmp_path, {})
    monkeypatch.setattr(session, "gpu", profile_named(gpu), raising=False)
    with BuildsAhead(session.as_session(), 1) as ahead:
        tune_of_four(tmp_path, session, ahead, pass_time_s=8.0)
    assert asked == [("forward", tmp_path, others)]


def test_the_searches_of_a_pass_share_their_overtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a search of a population would take 20 s for each of its problems."""
    session, given, over_s = FakeSession(tmp_path, {}), [], iter((-3.0, 15.0, 30.0, 1.0))

    def tuned(*arguments: Any) -> Any:
        task = arguments[2]
        given.append(round(task.overtime_s, 1))
        searched_s = task.deadline + next(over_s) - time.monotonic()
        yield from ()
        return SimpleNamespace(winner=SimpleNamespace(config=A[0]), search_s=searched_s)

    monkeypatch.setattr(engine, "tune_problem", tuned)
    with BuildsAhead(session.as_session(), 1) as ahead:
        tune = tune_of_four(tmp_path, session, ahead, pass_time_s=8.0)
        for place in range(4):
            list(tune._tune_problem(place, share=4 - place))
    assert given == [20.0, 20.0, 5.0, 0.0]


def test_finals_of_earlier_problems_leave_time_to_later_searches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, searched_s, now_s = FakeSession(tmp_path, {}), [], 100.0

    def tuned(*arguments: Any) -> Any:
        nonlocal now_s
        searched_s.append(arguments[2].deadline - now_s)
        now_s += searched_s[-1] + 9.0  # of finals
        yield from ()
        return SimpleNamespace(winner=SimpleNamespace(config=A[0]), search_s=searched_s[-1])

    monkeypatch.setattr(engine, "tune_problem", tuned)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: now_s))
    with BuildsAhead(session.as_session(), 1) as ahead:
        tune = tune_of_four(tmp_path, session, ahead, pass_time_s=24.0)
        for place in range(4):
            list(tune._tune_problem(place, share=4 - place))
    assert searched_s == [6.0, 3.0, 1.5, 1.5]


def test_nothing_is_started_ahead_once_a_tune_has_ended(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {}, slow=("a",))
    with BuildsAhead(session.as_session(), 1) as ahead:
        ahead.start(PROBLEM, A)
    session.not_reused()
    assert session.builds == ["a0"]


def test_time_that_is_up_ends_what_waits_and_leaves_it_free(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "b": 20.0}, slow=("b",))
    first = WarmStart((A[0], *B))
    for _ in range(3):
        search(tmp_path, session, [A[0], *B], first, 9, time_s=0.0)
    assert session.trials == [A[0]]
    assert fates(tmp_path)["b", 0] == ["passed over"]
    search(tmp_path, session, [A[0], *B], first, 9)
    assert session.trials == [A[0], *B]


def test_a_change_of_names_makes_builds_and_no_trials(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "b": 200.0})
    begin = WarmStart((*A, *B), "")
    before = search(tmp_path, session, [*A, *B], begin, 6)
    assert sorted(before.records, key=str) == sorted([*A, *B], key=str)
    trials = list(session.trials)
    session.edition = " with a comment"
    after = search(tmp_path, session, [*A, *B], begin, 6)
    assert session.trials == trials
    assert after.new_trials == 0
    assert {c: r.timing for c, r in after.records.items()} == {
        c: r.timing for c, r in before.records.items()
    }
    session.builds.clear()
    again = search(tmp_path, session, [*A, *B], begin, 6)
    assert again.records.keys() == after.records.keys()
    assert session.builds == [], "the text is known now"


def test_a_change_of_code_is_tried_anew(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0})
    search(tmp_path, session, A, WarmStart(tuple(A), ""), len(A))
    session.trials.clear()
    session.edition, session.code_edition = " with a comment", " and another instruction"
    after = search(tmp_path, session, A, WarmStart(tuple(A), ""), len(A))
    assert set(session.trials) == set(A)
    assert after.new_trials == len(A)


def test_what_the_search_proposes_is_reused_too(tmp_path: Path) -> None:
    """No time to build what the journal knows before the search: it is found when it is met."""
    session = FakeSession(tmp_path, {"a": 10.0, "b": 20.0})
    search(tmp_path, session, [*A, *B], WarmStart((*A, *B), ""), 6)
    session.trials.clear()
    session.edition = " with a comment"
    journal = session.journal.path
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(line.replace('"place": 0', '"place": 7') for line in lines) + "\n")
    after = search(tmp_path, session, [*A, *B], WarmStart((*A, *B), ""), 6)
    assert session.trials == []
    assert {A[0], B[0]} <= after.records.keys(), "records of renamed configs, by their code"


def test_a_config_that_branches_on_values_loses_by_its_time_on_trained_inputs(
    tmp_path: Path,
) -> None:
    for trained, best in (("", "a"), ("digest", "b")):
        folder = tmp_path / best
        folder.mkdir()
        session = FakeSession(folder, {"a": 10.0, "b": 11.0, "safe": 20.0})
        session.trained, session.us_trained = trained, {"a": 40.0}
        state = search(folder, session, [A[0], B[0], SAFE[0]], WarmStart((A[0], B[0])), 3)
        assert state.ranking()[0].config.variant == best


def test_only_what_could_win_is_timed_on_trained_inputs(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 10.0, "b": 11.4, "safe": 11.6})
    session.trained = "digest"
    record_of(A[0], session)
    state = search(tmp_path, session, [A[0], B[0], SAFE[0]], WarmStart(()), 3)
    assert session.trials[0] == A[0], "its record had no time on trained inputs"
    assert state.timed_again == 1
    trained = {record.config.variant: record.trained for record in state.records.values()}
    assert trained == {"a": "digest", "b": "digest", "safe": ""}


def test_a_late_search_waits_for_the_first_config_of_a_variant(tmp_path: Path) -> None:
    """The one that compiles at once is not the fastest."""
    session = FakeSession(tmp_path, {"a": 90.0, "b": 10.0}, slow=("b",))
    first = WarmStart((*A[:2], *B[:2]))
    with session.letting_go(after_cancelled=1):
        found = search(tmp_path, session, [*A, *B], first, 9, time_s=time.monotonic())
    assert found.ranking()[0].config == B[0]
    assert B[1] not in found.records, "its variant has a time by then"


def test_a_late_search_does_not_wait_for_long(tmp_path: Path) -> None:
    session = FakeSession(tmp_path, {"a": 90.0, "b": 10.0}, slow=("b",))
    with session.letting_go(after_cancelled=2):
        found = search(tmp_path, session, [*A, *B], WarmStart((*A[:2], *B[:2])), 9,
                       time_s=time.monotonic(), overtime_s=0.0)
    assert {r.config.variant for r in found.records.values()} == {"a"}
