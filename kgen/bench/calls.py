"""The host cost of a call: the emitted library's function and the operator's peers."""

from __future__ import annotations

from pathlib import Path

from kgen.bench.results import CallTable
from kgen.model.problem import Problem
from kgen.trial import Session
from kgen.worker import CallCosts


def run_call_costs(
    session: Session, problem: Problem, against: tuple[str, ...] | None, library: Path
) -> CallTable:
    """Measure the host time of calls without gradients, interleaved.

    Args:
        session: The session of the pass.
        problem: The problem. It must be small: with a large one the host would wait for the device.
        against: Names of peers; None: all peers except the slow ones.
        library: Folder of an emitted library.
    Raises:
        WorkerError: If the library cannot be used, or the worker died.
    """
    found = session.worker.call_costs(
        CallCosts(session.pass_name, problem, against, str(library))
    )
    return CallTable(
        pass_name=session.pass_name,
        problem=str(problem),
        launcher=found.launcher,
        first_ms=found.first_ms,
        costs=found.costs,
        failed=found.peer_errors,
    )
