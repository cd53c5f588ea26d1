"""Storages that processes share: URLs, patience, members, claims, and the log of records."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import TrialState
from search_fakes import config

from kgen.errors import OptionError, StorageError
from kgen.journal import Journal, RecordLog, SharedJournal
from kgen.model.record import Fate, Record, Timing
from kgen.search.membership import Membership, machine_id
from kgen.search.patient import patient_storage
from kgen.search.storage import open_storage, parse_storage, storage_option
from kgen.search.study import open_study

SECRET = "pa55/w:rd"
CONFIGS = [config("a", i) for i in range(12)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"journal://{tmp_path}/shared.log"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/shared.db"


def opened(url: str) -> optuna.storages.BaseStorage:
    return open_storage(parse_storage(url), patience_s=20.0)


# --- URLs


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://kgen:pa55%2Fw:rd@db:5433/tunes", "postgresql://kgen@db:5433/tunes"),
        ("postgresql+psycopg://kgen@db/tunes?sslmode=require", "postgresql://kgen@db/tunes"),
        ("mysql://kgen@db/tunes?password=pa55", "mysql://kgen@db/tunes"),
        ("grpc://proxy:13000", "grpc://proxy:13000"),
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
    ],
)
def test_urls_are_shown_without_password_and_query(text: str, shown: str) -> None:
    url = parse_storage(text)
    assert url.shown == str(url) == shown
    assert "pa55" not in repr(url)
    assert url.has_password == ("pa55" in text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tunes.db", "a URL needs a scheme"),
        ("redis://db", "scheme 'redis'"),
        ("postgresql:///tunes", "names no host"),
        ("grpc://proxy", "HOST:PORT"),
        ("sqlite://", "names no file"),
        (f"postgresql://kgen:{SECRET}@db:port/tunes", "malformed"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(text: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_storage(text)
    assert says in str(caught.value)
    assert SECRET not in str(caught.value)
    assert "pa55" not in str(caught.value)


def test_a_password_may_come_by_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "postgresql://kgen:pa55@db/tunes"
    with pytest.raises(OptionError) as caught:
        storage_option(text)
    assert "pa55" not in str(caught.value)
    assert "PGPASSWORD" in str(caught.value)
    monkeypatch.setenv("KGEN_STORAGE", text)
    found = storage_option(None)
    assert found is not None
    assert found.text == "postgresql+psycopg://kgen:pa55@db/tunes"
    monkeypatch.delenv("KGEN_STORAGE")
    assert storage_option(None) is None


def test_what_a_driver_says_is_shown_without_the_password() -> None:
    url = parse_storage("postgresql://kgen:pa55%2Fw@db/tunes?passfile=x")
    assert url.hide("cannot log in with pa55/w or pa55%2Fw") == "cannot log in with *** or ***"


def test_a_server_that_is_not_there_is_a_clear_error() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(StorageError) as caught:
        open_storage(parse_storage("postgresql://kgen:pa55@127.0.0.1:9/tunes"))
    assert "postgresql://kgen@127.0.0.1:9/tunes: cannot be opened" in str(caught.value)
    assert "PGPASSWORD" in str(caught.value)
    assert "pa55" not in str(caught.value)


# --- patience


class Broken:
    """Stands in for a storage whose server is gone for some calls."""

    def __init__(self, failures: int, gone: Exception | None = None) -> None:
        from sqlalchemy.exc import OperationalError

        self.failures, self.calls = failures, 0
        no_connection = Exception("no connection, password pa55")
        self.gone = gone or OperationalError("SELECT", {}, no_connection)

    def get_n_trials(self, study_id: int) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise StorageInternalError("commit") from self.gone
        return study_id

    def set_trial_state_values(self, *arguments: Any) -> bool:
        if self.calls < 1:
            return bool(self.get_n_trials(1))
        raise UpdateFinishedTrialError


def patient(broken: Broken, patience_s: float, said: list[str]) -> optuna.storages.BaseStorage:
    url = parse_storage("postgresql://kgen:pa55@db/tunes")
    return patient_storage(broken, url, patience_s, said.append)  # type: ignore[arg-type]


def test_a_call_is_repeated_until_the_server_answers() -> None:
    said: list[str] = []
    broken = Broken(failures=2)
    assert patient(broken, 20.0, said).get_n_trials(7) == 7
    assert broken.calls == 3
    assert [line.split(" (")[0] for line in said] == [
        "postgresql://kgen@db/tunes does not answer", "postgresql://kgen@db/tunes answers again",
    ]
    assert "pa55" not in "".join(said)


def test_a_query_that_optuna_repeats_in_a_broken_transaction_is_repeated_in_another() -> None:
    from sqlalchemy.exc import PendingRollbackError

    broken = Broken(1, PendingRollbackError("Can't reconnect until it is rolled back"))
    assert patient(broken, 20.0, []).get_n_trials(7) == 7


def test_patience_ends() -> None:
    with pytest.raises(StorageError, match=r"no answer for 0\.05 s") as caught:
        patient(Broken(failures=1000), 0.05, []).get_n_trials(7)
    assert "pa55" not in str(caught.value)


def test_an_answer_that_was_lost_is_no_error() -> None:
    """The first call was carried out, so the second finds the trial finished."""
    assert patient(Broken(1), 20.0, []).set_trial_state_values(1, TrialState.COMPLETE, [1.0])
    answers = Broken(0)
    answers.calls = 1
    with pytest.raises(UpdateFinishedTrialError):
        patient(answers, 20.0, []).set_trial_state_values(1, TrialState.COMPLETE, [1.0])


# --- members


def test_a_process_that_left_is_dead(url: str) -> None:
    with Membership(opened(url), {"gpu": "host"}, beat_s=0.1) as mine:
        with Membership(opened(url), {"gpu": "host"}, beat_s=0.1) as other:
            assert [m.id for m in mine.members()] == [mine.id, other.id]
            assert (mine.number, other.number) == (0, 1)
        time.sleep(1.1)  # members are read once a second
        assert mine.is_dead(other.id)
        assert not mine.is_dead(mine.id)


def test_a_process_that_joined_after_the_members_were_read_is_alive(url: str) -> None:
    with Membership(opened(url), {}) as mine:
        assert [m.id for m in mine.members()] == [mine.id]
        with Membership(opened(url), {}) as other:
            theirs = open_study(opened(url), "s", CONFIGS, membership=other)
            assert len(theirs.ask(2)) == 2
            assert not mine.is_dead(other.id)
            seen = open_study(opened(url), "s", CONFIGS, membership=mine)
            assert seen.running_elsewhere() == 2


def test_a_silent_process_of_another_machine_dies_after_the_grace(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kgen.search.membership.machine_id", lambda: "another machine")
    other = Membership(opened(url), {}, beat_s=0.05)
    other.__enter__()
    monkeypatch.setattr("kgen.search.membership.machine_id", machine_id)
    monkeypatch.setattr("kgen.search.membership._READ_EVERY_S", 0.0)
    with Membership(opened(url), {}, beat_s=0.05, grace_s=2.0) as mine:
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            assert not mine.is_dead(other.id)  # its heart beats
            time.sleep(0.05)
        other._left.set()  # it falls silent, as a machine without power does
        other._thread.join()
        assert not mine.is_dead(other.id)
        until = time.monotonic() + 20.0
        while not mine.is_dead(other.id) and time.monotonic() < until:
            time.sleep(0.05)
        assert mine.is_dead(other.id)


def test_silence_that_the_observer_slept_through_does_not_count_as_death(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a server was down for longer than the grace time: no member could send a heartbeat."""
    clock = [1000.0]
    monkeypatch.setattr("kgen.search.membership.machine_id", lambda: "another machine")
    other = Membership(opened(url), {}, beat_s=3600.0)
    other.__enter__()
    monkeypatch.setattr("kgen.search.membership.machine_id", machine_id)
    with Membership(opened(url), {}, beat_s=3600.0, grace_s=60.0) as mine:
        monkeypatch.setattr("kgen.search.membership.time", SimpleNamespace(
            monotonic=lambda: clock[0]))
        assert not mine.is_dead(other.id)
        clock[0] += 500.0
        assert not mine.is_dead(other.id)
        clock[0] += 20.0
        assert not mine.is_dead(other.id)
        clock[0] += 20.0
        assert mine.is_dead(other.id)


def test_a_process_of_this_machine_dies_with_its_pid(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_join_and_die, args=(url,))
    process.start()
    process.join()
    with Membership(opened(url), {}, grace_s=3600.0) as mine:
        assert [m.id for m in mine.members()] == [mine.id]


def _join_and_die(url: str) -> None:
    import os

    Membership(opened(url), {}).__enter__()
    os._exit(9)


# --- claims


def test_no_config_is_claimed_twice(url: str) -> None:
    with Membership(opened(url), {}) as one, Membership(opened(url), {}) as two:
        first = open_study(opened(url), "s", CONFIGS, seed=1, membership=one)
        second = open_study(opened(url), "s", CONFIGS, seed=1, membership=two)
        claimed = [p.config for _ in range(3) for s in (first, second) for p in s.ask(2)]
        assert len(claimed) == len(set(claimed)) == 12
        assert first.running_elsewhere() == 6


def test_together_no_more_than_the_limit(url: str) -> None:
    with Membership(opened(url), {}) as one, Membership(opened(url), {}) as two:
        first = open_study(opened(url), "s", CONFIGS, seed=1, membership=one)
        second = open_study(opened(url), "s", CONFIGS, seed=2, membership=two)
        assert len(first.ask(4, at_most=6)) == 4
        assert len(second.ask(4, at_most=6)) == 2
        assert second.ask(4, at_most=6) == []
        assert len(first.ask(4, at_most=7)) == 1


def test_claims_of_a_process_that_left_are_free(url: str) -> None:
    with Membership(opened(url), {}) as one:
        mine = open_study(opened(url), "s", CONFIGS, membership=one)
        for _ in range(2):  # a config that was never begun may be claimed by any number of dead
            with Membership(opened(url), {}) as two:
                theirs = open_study(opened(url), "s", CONFIGS, membership=two)
                taken = theirs.ask(12)
                assert len(taken) == 12
                assert mine.ask(4) == []
            time.sleep(1.1)
            assert mine.running_elsewhere() == 0
        # The other thinks itself alive, and learns that the claim is gone.
        assert not theirs.begin(taken[0].number)
        got = mine.ask(12)
        assert len(got) == 12
        assert mine.begin(got[0].number)


def test_a_trial_that_began_just_before_its_process_died_was_interrupted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Membership(opened(url), {}) as one:
        mine = open_study(opened(url), "s", CONFIGS, membership=one)
        with Membership(opened(url), {}) as two:
            theirs = open_study(opened(url), "s", CONFIGS, membership=two)
            [taken] = theirs.ask(1)
            seen = mine.study.get_trials()  # not begun
            assert theirs.begin(taken.number)
        time.sleep(1.1)
        monkeypatch.setattr(mine.study, "get_trials", lambda **_: seen)
        assert mine.running_elsewhere() == 0
        monkeypatch.undo()
        [trial] = mine.study.get_trials()
        assert trial.user_attrs["fate"] == "interrupted"


def test_a_claim_whose_answer_was_lost_is_free(url: str) -> None:
    with Membership(opened(url), {}) as one:
        search = open_study(opened(url), "s", CONFIGS, membership=one)
        search.ask(12)
        search._mine.clear()  # as if the answers of the database had been lost
        assert search.running_elsewhere() == 0
        assert len(search.ask(12)) == 12


# --- records


def record(place: int, when: str = "now", fate: Fate = Fate.VERIFIED) -> Record:
    return Record(
        "key", "op", "forward", "M=8", "h200", config("a", place), fate, when=when,
        text_key=f"text {place}", timing=Timing(1.0, 1.0, 1.0, 1, "p"),
    )


def journal(folder: Path, url: str) -> SharedJournal:
    log = RecordLog(opened(url), "op/h200/device")
    return SharedJournal(folder / "h200.trials.jsonl", log, lambda r: r.problem == "M=8")


def test_records_reach_every_machine_once(tmp_path: Path, database: str) -> None:
    here, there = journal(tmp_path / "here", database), journal(tmp_path / "there", database)
    here.append(record(1))
    there.append(record(2))
    here.append(record(3))
    for one in (here, there, here):
        assert {r.config for r in one.read()} == {config("a", i) for i in (1, 2, 3)}
    lines = [p.read_text().splitlines() for p in (here.path, there.path)]
    assert sorted(lines[0]) == sorted(lines[1])
    assert len(lines[0]) == 3


def test_records_of_before_are_sent_if_the_tune_wants_them(tmp_path: Path, database: str) -> None:
    local = Journal(tmp_path / "here" / "h200.trials.jsonl")
    for i in range(200):
        local.append(record(i % 24, when=f"{i}"))
    other = json.loads(local.path.read_text().splitlines()[0]) | {"problem": "M=9"}
    with local.path.open("a") as file:
        file.write(json.dumps(other) + "\n")
    list(journal(tmp_path / "here", database).read())
    assert len(list(journal(tmp_path / "there", database).read())) == 200


def test_a_record_that_could_not_be_sent_is_sent_later(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = journal(tmp_path / "here", database)
    list(here.read())

    def gone(self: RecordLog, lines: object) -> None:
        raise StorageError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(RecordLog, "push", gone)
        with pytest.raises(StorageError):
            here.append(record(1))
    assert len(list(Journal(here.path).read())) == 1
    list(journal(tmp_path / "here", database).read())
    assert len(list(journal(tmp_path / "there", database).read())) == 1


def test_two_processes_of_one_machine_add_a_line_once(tmp_path: Path, database: str) -> None:
    one, two = journal(tmp_path / "here", database), journal(tmp_path / "here", database)
    journal(tmp_path / "there", database).append(record(1))
    for each in (one, two, one):
        list(each.read())
    assert len(one.path.read_text().splitlines()) == 1


# --- Optuna's gRPC proxy


def test_all_of_it_goes_through_optunas_proxy(tmp_path: Path, database: str) -> None:
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'kgen[grpc]'")
    from optuna.storages._grpc.server import make_server

    assert grpc
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = make_server(optuna.storages.get_storage(database), "127.0.0.1", port)
    server.start()
    try:
        proxy = f"grpc://127.0.0.1:{port}"
        with Membership(opened(proxy), {}) as one, Membership(opened(proxy), {}) as two:
            first = open_study(opened(proxy), "s", CONFIGS, membership=one)
            second = open_study(opened(proxy), "s", CONFIGS, membership=two)
            claimed = [p.config for s in (first, second) for p in s.ask(6)]
            assert len(set(claimed)) == 12
            assert first.running_elsewhere() == 6
        journal(tmp_path / "here", proxy).append(record(1))
        assert len(list(journal(tmp_path / "there", proxy).read())) == 1
    finally:
        server.stop(None)


def test_a_proxy_that_is_not_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'kgen[grpc]'")
    monkeypatch.setattr("kgen.search.storage._CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(StorageError, match="run_grpc_proxy_server"):
        opened("grpc://127.0.0.1:9")
