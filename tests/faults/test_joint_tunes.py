"""Searches that several processes make together: kills of workers, of the tuner, of the database.

The processes of `joint_worker.py` run the real search loop, claims and log of records, with
stand-ins for compiler and device.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joint_worker import CONFIGS, joint_search
from optuna.distributions import json_to_distribution
from postgres import PASSWORD, Postgres, postgres_server

from kgen.journal import Journal
from kgen.model.record import Record
from kgen.search.params import ParamSpace
from kgen.search.study import Search
from kgen.tune.joint_proposals import JOINT_QUEUE

FOLDER = Path(__file__).parent
TRIALS = 30
SLOW_S = 0.1
LONG_S = 0.3  # trials are left when the database is killed


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres_server() as running:
        yield running


class Process:
    """A process of `joint_worker.py`."""

    def __init__(self, role: str, storage: str, folder: Path, seconds: float = SLOW_S) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(FOLDER / "joint_worker.py"), role, storage, str(folder),
                 str(TRIALS), str(seconds)],
                stdout=log, stderr=log, env={**os.environ, "PGPASSWORD": PASSWORD},
            )

    def wait_for_trials(self, count: int) -> None:
        deadline = time.monotonic() + 60
        while len(self.tried()) < count:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def wait_for_line(self, part: str) -> None:
        deadline = time.monotonic() + 60
        while part not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def tried(self) -> list[str]:
        path = self.folder / "tried"
        return path.read_text().splitlines() if path.exists() else []

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(30)

    def must_end_well(self) -> None:
        assert self.process.wait(90) == 0, self.log.read_text()

    def records(self) -> list[Record]:
        return list(Journal(self.folder / "h200.trials.jsonl").read())


def check(records: list[Record], processes: list[Process], interrupted: Counter[str]) -> None:
    """Every config has one record; only trials that a kill interrupted were begun twice.

    A kill interrupts the running trial and the next one in the queue; either may have ended without
    its record being sent. A config whose trials were interrupted by two kills is not tried again.
    """
    recorded = Counter(r.config.label for r in records)
    assert set(recorded.values()) == {1}
    begun = Counter(label for process in processes for label in process.tried())
    twice = {label for label, count in begun.items() if count > 1}
    assert twice <= set(interrupted), f"tried twice: {twice - set(interrupted)}"
    assert max(begun.values()) <= 2
    given_up = {label for label, count in interrupted.items() if count > 1} - set(recorded)
    assert len(recorded) + len(given_up) == TRIALS


def interruptions(server: Postgres, database: str) -> Counter[str]:
    """How often a trial of each config was interrupted, by the shared study."""
    rows = server.query(
        "SELECT t.trial_id, p.param_name, p.param_value, p.distribution_json FROM trial_params p "
        "JOIN trials t ON t.trial_id = p.trial_id JOIN trial_user_attributes a "
        "ON a.trial_id = t.trial_id WHERE a.key = 'fate' AND a.value_json = '\"interrupted\"'",
        database,
    )
    params: dict[int, dict[str, Any]] = {}
    for trial, name, value, distribution in rows:
        kind = json_to_distribution(distribution)
        params.setdefault(trial, {})[name] = kind.to_external_repr(value)
    space = ParamSpace.of(CONFIGS)
    configs = [space.config_of(values) for values in params.values()]
    return Counter(found.label for found in configs if found is not None)


def test_kills_of_worker_database_and_tuner(tmp_path: Path, server: Postgres) -> None:
    url = server.new_database("kills")
    tuner = Process("tuner", url, tmp_path / "tuner", LONG_S)
    workers = [Process("worker", url, tmp_path / f"worker{i}", LONG_S) for i in range(2)]
    workers[0].wait_for_trials(3)
    workers[0].end()
    tuner.wait_for_trials(3)
    server.kill()
    tuner.wait_for_line("does not answer")
    assert tuner.process.poll() is None
    server.start()
    counted = len(tuner.tried())
    tuner.wait_for_trials(counted + 2)  # it goes on
    tuner.wait_for_line("answers again")  # a thread may still wait for its next attempt
    tuner.end()
    again = Process("tuner", url, tmp_path / "tuner", LONG_S)
    again.must_end_well()
    workers[1].must_end_well()
    interrupted = interruptions(server, "kills")
    assert 1 <= sum(interrupted.values()) <= 2 * JOINT_QUEUE
    check(again.records(), [again, *workers], interrupted)

    # A record that a kill kept from being sent is in the journal file; the next start sends it.
    back = Process("worker", url, tmp_path / "worker0", LONG_S)
    back.must_end_well()
    reader = Process("tuner", url, tmp_path / "reader", LONG_S)
    reader.must_end_well()
    assert not reader.tried()
    known = {r.id for r in reader.records()}
    for process in (again, *workers):
        assert {r.id for r in process.records()} <= known, "a record was lost"

    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PASSWORD not in path.read_text(errors="replace"), path


def test_no_more_is_begun_than_recorded_while_the_storage_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill would interrupt all of it, although most of it has ended."""
    begin, begun = Search.begin, []

    def slow_begin(study: Search, number: int) -> bool:
        time.sleep(0.05)  # several trials long
        begun.append(number)
        return begin(study, number)

    monkeypatch.setattr(Search, "begin", slow_begin)
    url = f"journal://{tmp_path / 'study.log'}"
    open_trials = []
    with joint_search("tuner", url, tmp_path, TRIALS, 0.01) as search:
        for count, _ in enumerate(search.run()):
            open_trials.append(len(begun) - count)
    assert len(begun) == TRIALS
    assert max(open_trials) == JOINT_QUEUE


def test_sigterm_frees_the_claims_at_once(tmp_path: Path, server: Postgres) -> None:
    url = server.new_database("leaves")
    tuner = Process("tuner", url, tmp_path / "tuner")
    worker = Process("worker", url, tmp_path / "worker")
    worker.wait_for_trials(2)
    worker.end(signal.SIGINT)
    tuner.must_end_well()
    check(tuner.records(), [tuner, worker], Counter())
    running = server.query("SELECT count(*) FROM trials WHERE state = 'RUNNING'", "leaves")
    assert running == [(0,)]
