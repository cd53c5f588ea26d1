"""An aborted worker is killed in whatever state it is, and not replaced."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kgen.catalogue import profile_named
from kgen.errors import WorkerError
from kgen.trial import WorkerHandle
from kgen.worker import Setup

SETUP = Setup("rmsnorm", (), profile_named("host"), 0, seed=1)


def test_starts_no_worker_once_aborted() -> None:
    with WorkerHandle(SETUP, spare=False) as worker:
        worker.abort()
        with pytest.raises(WorkerError, match="was aborted"):
            worker.probe()


def test_whoever_waits_for_an_answer_is_told() -> None:
    """Aborted while it starts, which takes longer than coming here."""
    with WorkerHandle(SETUP, spare=False) as worker, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(worker.probe)
        while worker._newest is None:
            pass
        worker.abort()
        with pytest.raises(WorkerError, match="was aborted"):
            asked.result()
