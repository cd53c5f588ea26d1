"""What a tune runs its trials with: a session on a worker, and the prover of host runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kgen.assets import include_dir
from kgen.model.gpu import GpuProfile
from kgen.tune.request import TuneRequest
from kgen.worker import HostProver, Session, Setup, WorkerHandle


@contextmanager
def opened_session(request: TuneRequest) -> Iterator[tuple[Session, HostProver]]:
    """The worker's session and the prover; both end with the block."""
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
        HostProver(setup, include_dir(), _proofs_at_once(request.gpu)) as prover,
    ):
        session = Session(
            request.entry,
            request.pass_name,
            request.gpu,
            request.compiler,
            request.journal,
            worker,
            request.l2,
        )
        yield session, prover


def _proofs_at_once(gpu: GpuProfile) -> int:
    """Host runs beside the search: a few where there are cores for them. On the host they come
    after it, when nothing is timed any more."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(4, cores) if gpu.is_host else min(8, cores // 2))
