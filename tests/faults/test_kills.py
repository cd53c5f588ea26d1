"""SIGKILL to the worker and to the tuner, at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from planting import DEVICES, compiler_for, journal_path, plant, records, request, run_tune
from processes import cpu_seconds, descendants_of, is_running, workers_of

from kgen.journal import Journal
from kgen.model.record import Fate
from kgen.tune import Progress

FOLDER = Path(__file__).parent
# CI kills a few times; `KGEN_KILLS=100 pytest tests/faults/test_kills.py` is the full test.
KILLS = int(os.environ.get("KGEN_KILLS", "6"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_worker_is_replaced(tmp_path: Path, device: str) -> None:
    mine = plant(tmp_path, ["none"], threads=(32, 64, 128, 256, 512, 1024))
    compiler = compiler_for(device)
    killed: list[int] = []

    def kill_once(progress: Progress) -> None:
        # A spare may stand beside the worker with the device. Kill them all.
        if not killed and progress.fates.get(Fate.VERIFIED, 0) == 2:
            for pid in workers_of(os.getpid()):
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    asked = request(tmp_path, mine, compiler, device)
    result = run_tune(asked, kill_once)
    compiler.close()
    assert killed
    assert result.worker_restarts >= 1
    found = records(tmp_path)
    crashed = [r for r in found if r.fate is Fate.CRASHED]
    assert len(crashed) <= 1  # none if the kill fell between two trials
    assert all("SIGKILL" in r.reason for r in crashed)
    assert result.results[0].winner.record.fate is Fate.VERIFIED


@pytest.mark.parametrize("device", DEVICES)
def test_a_tuner_killed_again_and_again_loses_nothing(tmp_path: Path, device: str) -> None:
    """Every tune continues where the last one was killed; no record is lost or damaged, no process
    is left, and in the end the tune is complete."""
    mine = plant(tmp_path, ["none", "unwritten"], threads=(32, 64, 128, 256, 512, 1024))
    chance = random.Random(0)
    command = [sys.executable, str(FOLDER / "killed_tuner.py"), str(tmp_path), str(mine), device]
    known: list[str] = []
    longest_s = 3.0
    for _ in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        started = time.monotonic()
        offspring: set[int] = set()
        end = started + chance.uniform(0.3, longest_s)
        while time.monotonic() < end and process.poll() is None:
            offspring |= descendants_of(process.pid)
            time.sleep(0.02)
        if process.poll() is not None:
            _, said = process.communicate()
            assert process.returncode == 0, said.decode()
            longest_s = max(1.0, time.monotonic() - started)  # it had nothing left to do
        else:
            process.kill()
            process.wait()
        gone_by = time.monotonic() + 30.0
        while any(map(is_running, offspring)) and time.monotonic() < gone_by:
            time.sleep(0.02)
        assert not [pid for pid in offspring if is_running(pid)], "a process outlived its tuner"
        journal = Journal(journal_path(tmp_path))
        ids = [r.id for r in journal.read()]
        assert ids[: len(known)] == known, "a record was lost"
        assert journal.skipped_lines <= 1
        known = ids
    last = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert last.returncode == 0, last.stderr
    assert "fault=none" in last.stdout
    trials = [r for r in records(tmp_path) if r.evidence is None]
    assert {r.fate for r in trials} == {Fate.VERIFIED, Fate.WRONG}
    assert len({r.config for r in trials}) == 12
    assert len(trials) == 12, "a config was tried twice"


def test_an_endless_kernel_ends_with_its_tuner(tmp_path: Path) -> None:
    """The worker cannot read its pipe while a kernel runs, but it must end nevertheless."""
    mine = plant(tmp_path, ["endless_loop"])
    command = [sys.executable, str(FOLDER / "killed_tuner.py"), str(tmp_path), str(mine), "host"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    seen: set[int] = set()

    def busy() -> list[int]:
        seen.update(descendants_of(process.pid))
        return [pid for pid in seen if is_running(pid) and cpu_seconds(pid) > 4.0]

    try:
        deadline = time.monotonic() + 60.0
        while not busy() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.1)
        assert process.poll() is None
        assert busy(), "no worker was caught in the kernel"
    finally:
        process.kill()
        process.wait()
    gone_by = time.monotonic() + 30.0  # a busy machine
    while any(map(is_running, seen)) and time.monotonic() < gone_by:
        time.sleep(0.05)
    assert not [pid for pid in seen if is_running(pid)]


def test_replacing_a_worker_takes_no_import(tmp_path: Path) -> None:
    """A spare stands ready, with everything loaded."""
    from kgen.catalogue import profile_named
    from kgen.trial import WorkerHandle
    from kgen.worker import Setup

    mine = plant(tmp_path, ["none"])
    with WorkerHandle(Setup("planted", (str(mine),), profile_named("host"), 0, 0)) as worker:
        worker.probe()
        first = worker._child
        spare = worker._spare
        assert first is not None
        assert spare is not None
        assert first.pid is not None
        os.kill(first.pid, signal.SIGKILL)
        threading.Event().wait(0.1)
        with pytest.raises(Exception, match="SIGKILL"):
            worker.probe()
        worker.probe()
        assert worker._child is spare
        assert worker.restarts == 1
        assert len(worker.replacement_s) == 1
