"""Profile kgen's kernel and its peers with torch.profiler."""

from __future__ import annotations

from pathlib import Path

from kgen.bench.prepare import certified
from kgen.bench.results import ChosenConfig, Profile
from kgen.model.problem import Problem
from kgen.trial import Session
from kgen.worker import Finals, Trace


def run_profile(
    session: Session,
    problem: Problem,
    choice: ChosenConfig,
    against: tuple[str, ...] | None,
    trace: Path,
    library: Path | None = None,
) -> Profile:
    """Verify the chosen kernel, then trace it and its peers, one after the other.

    Args:
        session: The session of the pass.
        problem: The problem.
        choice: The config of kgen's kernel.
        against: Names of peers; None: all peers, including those that are too slow for a tune.
        trace: File of the trace.
        library: Folder of an emitted library whose function is also traced; None: no library.
    Raises:
        BenchError: If the kernel is wrong; nothing is traced then.
        WorkerError: If the worker died, or the trace cannot be written.
    """
    ((candidate, _),) = certified(session, problem, [choice.config])
    finals = Finals(
        session.pass_name, problem, (candidate,), against, "" if library is None else str(library)
    )
    outcome = session.worker.trace(Trace(finals, str(trace)))
    return Profile(
        pass_name=session.pass_name,
        problem=str(problem),
        origin=choice.origin,
        remark=choice.remark,
        variant=choice.config.variant,
        config=choice.config.as_dict(),
        on_gpu=not session.gpu.is_host,
        contenders=outcome.traced,
        failed=outcome.peer_errors,
        trace=str(trace),
    )
