"""The lock on the study's file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

from kgen.model.config import Config
from kgen.search.lock import FileLock
from kgen.search.study import open_study


def _hold(path: str, ready: object) -> None:
    FileLock(path).acquire()
    ready.set()  # type: ignore[attr-defined]
    time.sleep(60)


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "study")
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(path, ready))
    holder.start()
    assert ready.wait(30)
    taken = threading.Event()

    def take() -> None:
        lock = FileLock(path)
        lock.acquire()
        taken.set()
        lock.release()

    waiter = threading.Thread(target=take)
    waiter.start()
    assert not taken.wait(0.2), "the lock was held"
    assert holder.pid is not None
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert taken.wait(10)
    waiter.join()


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    lock = FileLock(str(tmp_path / "study"))
    inside = 0
    worst = 0

    def work() -> None:
        nonlocal inside, worst
        for _ in range(50):
            lock.acquire()
            inside += 1
            worst = max(worst, inside)
            time.sleep(0.0001)
            inside -= 1
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1


def test_optunas_own_stale_lock_does_not_stop_a_study(tmp_path: Path) -> None:
    path = tmp_path / "study.log"
    configs = [Config.of("v", {"a": a}) for a in range(4)]
    open_study(path, "s", configs).ask(1)
    (tmp_path / "study.log.lock").symlink_to("relative/study.log")
    assert len(open_study(path, "s", configs).ask(2)) == 2
