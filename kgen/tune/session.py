"""Open the session of a tune's trials on a worker, and the runner of its host runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kgen.assets import include_dir
from kgen.model.gpu import GpuProfile
from kgen.trial import (
    HostRunner,
    Session,
    WorkerHandle,
    WorkerPool,
    check_peer_names,
    jobs_beside,
)
from kgen.tune.request import TuneRequest
from kgen.worker import Setup

# A helper keeps one core busy, host runs occupy half of the cores, and each helper holds a CUDA
# context and the input sets of its trial in device memory.
_MOST_HELPERS = 3
_CORES_PER_HELPER = 4


@contextmanager
def open_session(
    request: TuneRequest, pass_name: str
) -> Iterator[tuple[Session, HostRunner]]:
    """Open the worker's session and the host runner for one pass; both end with the block.

    Raises:
        CatalogueError: If the request names a peer that neither pass has on this machine.
    """
    setup = _setup(request)
    with (
        WorkerHandle(setup, request.limits.trial_s) as worker,
        HostRunner(setup, include_dir(), *_host_runs_at_once(request.gpu)) as host_runner,
    ):
        if request.against:
            operator = request.entry.operator
            passes = [pass_.name for pass_ in operator.signature.passes]
            check_peer_names(request.against, operator.name, passes, worker)
        session = Session(
            request.entry,
            pass_name,
            request.gpu,
            request.compiler,
            request.journal,
            worker,
            request.l2,
            request.certificates,
        )
        yield session, host_runner


def worker_pool(request: TuneRequest, session: Session) -> WorkerPool:
    """The session's worker with its helpers, which certify the safe variant; enter it."""

    def open_helper() -> WorkerHandle:
        return WorkerHandle(_setup(request), request.limits.trial_s, spare=False)

    helpers = min(_MOST_HELPERS, len(os.sched_getaffinity(0)) // _CORES_PER_HELPER)
    # On the host, nothing is verified on a device. A memory limit applies to each process, so
    # several processes together would exceed it.
    if request.gpu.is_host or request.limits.memory_bytes is not None:
        helpers = 0
    return WorkerPool(session.worker, open_helper, helpers)


def _setup(request: TuneRequest) -> Setup:
    """The setup that every worker of a tune receives."""
    return Setup(
        request.entry.operator.name,
        request.paths,
        request.gpu,
        request.ordinal,
        request.seed,
        request.l2,
        memory_bytes=request.limits.memory_bytes,
    )


def _host_runs_at_once(gpu: GpuProfile) -> tuple[int, int]:
    """Worker processes that make host runs at the same time: at first, and at the end of a pass.

    In a tune for a GPU, host runs use half of the cores during the search, and all but one once
    only host runs are left. On the host they run after the search, when nothing is timed.
    """
    cores = len(os.sched_getaffinity(0))
    if gpu.is_host:
        return min(4, cores), min(4, cores)
    return jobs_beside(cores // 2), jobs_beside(cores - 1)
