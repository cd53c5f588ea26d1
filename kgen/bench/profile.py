"""Where the time goes: our kernel and its peers under torch.profiler."""

from __future__ import annotations

from pathlib import Path

from kgen.bench.prepare import certified
from kgen.bench.results import Choice, Profile
from kgen.model.problem import Problem
from kgen.worker import Finals, Session, Trace


def run_profile(
    session: Session,
    problem: Problem,
    choice: Choice,
    against: tuple[str, ...] | None,
    trace: Path,
    library: Path | None = None,
) -> Profile:
    """Verify the chosen kernel, then trace it and its peers, one after the other.

    Args:
        session: Of the pass.
        problem: The problem.
        choice: Which of our kernels.
        against: Names of peers; None: all, those that are too slow for a tune among them.
        trace: Where the trace goes.
        library: Folder of an emitted library whose function is traced, too; None: none.
    Raises:
        BenchError: If the kernel is not right; nothing is traced then.
        WorkerError: If the worker died over it, or the trace cannot be written.
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
