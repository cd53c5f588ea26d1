"""Searches that several processes make together: kills of workers, of the tuner, of the database.

The processes of `joint_worker.py` run the real search loop, claims and log of records; compiler
and device are stood in for.
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

import pytest
from postgres import PASSWORD, Postgres, postgres_server

from kgen.journal import Journal
from kgen.model.record import Record
from kgen.tune.joint_proposals import JOINT_QUEUE

FOLDER = Path(__file__).parent
TRIALS = 30
SLOW_S = 0.1


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


def check(records: list[Record], processes: list[Process], killed: int) -> None:
    """Every config has one record; only what a kill interrupted was begun twice.

    A killed process loses the trial that runs, and one that has ended while its loop waits for the
    database. A config whose trial two kills interrupted is not tried a third time.
    """
    recorded = Counter(r.config.label for r in records)
    assert set(recorded.values()) == {1}
    known = {r.id for r in records}
    for process in processes:
        assert {r.id for r in process.records()} <= known, "a record was lost"
    begun = Counter(label for process in processes for label in process.tried())
    twice = [label for label, count in begun.items() if count > 1]
    given_up = [label for label in twice if label not in recorded]
    assert len(given_up) <= (killed - 1) * JOINT_QUEUE if killed > 1 else not given_up
    assert len(recorded) + len(given_up) == TRIALS
    assert len(twice) <= killed * JOINT_QUEUE, f"tried twice: {twice}"
    assert max(begun.values()) <= 2


def test_kills_of_worker_database_and_tuner(tmp_path: Path, server: Postgres) -> None:
    url = server.new_database("kills")
    tuner = Process("tuner", url, tmp_path / "tuner")
    workers = [Process("worker", url, tmp_path / f"worker{i}") for i in range(2)]
    workers[0].wait_for_trials(3)
    workers[0].end()
    tuner.wait_for_trials(5)
    server.kill()
    time.sleep(1.0)
    assert tuner.process.poll() is None
    server.start()
    counted = len(tuner.tried())
    tuner.wait_for_trials(counted + 2)  # it goes on
    deadline = time.monotonic() + 60
    while "answers again" not in tuner.log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)  # a thread may still wait for its next attempt
    tuner.end()
    again = Process("tuner", url, tmp_path / "tuner")
    again.must_end_well()
    workers[1].must_end_well()
    check(again.records(), [again, *workers], killed=2)
    assert "does not answer" in tuner.log.read_text()
    assert "answers again" in tuner.log.read_text()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or PASSWORD not in path.read_text(errors="replace"), path


def test_sigterm_frees_the_claims_at_once(tmp_path: Path, server: Postgres) -> None:
    url = server.new_database("leaves")
    tuner = Process("tuner", url, tmp_path / "tuner")
    worker = Process("worker", url, tmp_path / "worker")
    worker.wait_for_trials(2)
    worker.end(signal.SIGINT)
    tuner.must_end_well()
    check(tuner.records(), [tuner, worker], killed=0)
    running = server.query("SELECT count(*) FROM trials WHERE state = 'RUNNING'", "leaves")
    assert running == [(0,)]
