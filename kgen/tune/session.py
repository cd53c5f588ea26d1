"""Open the session of a tune's trials on a worker, and the runner of its host runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kgen.assets import include_dir
from kgen.model.gpu import GpuProfile
from kgen.trial import HostRunner, Session, WorkerHandle
from kgen.tune.request import TuneRequest
from kgen.worker import Setup


@contextmanager
def open_session(
    request: TuneRequest, pass_name: str
) -> Iterator[tuple[Session, HostRunner]]:
    """Open the worker's session and the host runner for one pass; both end with the block."""
    setup = Setup(
        request.entry.operator.name,
        request.paths,
        request.gpu,
        request.ordinal,
        request.seed,
        request.l2,
        memory_bytes=request.limits.memory_bytes,
    )
    with (
        WorkerHandle(setup, request.limits.trial_s) as worker,
        HostRunner(setup, include_dir(), _host_runs_at_once(request.gpu)) as host_runner,
    ):
        session = Session(
            request.entry,
            pass_name,
            request.gpu,
            request.compiler,
            request.journal,
            worker,
            request.l2,
        )
        yield session, host_runner


def _host_runs_at_once(gpu: GpuProfile) -> int:
    """Number of concurrent host runs.

    On a GPU they run during the search, on half of the cores. On the host they run after the
    search, when nothing is timed.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(4, cores) if gpu.is_host else min(8, cores // 2))
