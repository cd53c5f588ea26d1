"""`kgen verify`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kgen.certify import Checked, check_problem, check_record
from kgen.cli.opening import Opened, opened
from kgen.errors import RecordError
from kgen.worker import Session, Setup, WorkerHandle


def run(options: argparse.Namespace) -> int:
    """Print one verdict per line; 1 if any kernel is wrong."""
    wrong = checked = 0
    with opened(options) as common:
        setup = Setup(
            common.entry.operator.name, common.paths, common.gpu, common.ordinal, options.seed
        )
        with WorkerHandle(setup) as worker:
            for result in _results(options, common, worker):
                checked += 1
                wrong += not result.ok
                _print(result)
        print(
            f"{checked - wrong} of {checked} kernels compute {common.entry.operator.name} on "
            f"{common.gpu.title}"
        )
    return 1 if wrong else 0


def _results(
    options: argparse.Namespace, common: Opened, worker: WorkerHandle
) -> Iterator[Checked]:
    missing: RecordError | None = None
    for pass_name in common.passes:
        session = Session(
            common.entry,
            pass_name,
            common.gpu,
            common.compiler,
            common.reports / f"{common.gpu.name}.trials.jsonl",
            worker,
        )
        if options.record:
            try:
                yield check_record(session, options.record)
                return
            except RecordError as problem:  # it may be a record of another pass
                missing = problem
                continue
        for problem_ in common.problems[pass_name]:
            yield from check_problem(session, problem_)
    if missing is not None:
        raise missing


def _print(result: Checked) -> None:
    worst = max((a.error / a.bound for a in result.outcome.accuracy if a.bound), default=None)
    share = f"error {100 * worst:.0f} % of its bound" if worst is not None else ""
    print(f"{result.outcome.fate.value:<12} {result.problem}  {result.config.label}  {share}")
    if not result.ok:
        print("  " + result.outcome.reason.replace("\n", "\n  "))
