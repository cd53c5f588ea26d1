"""`kgen verify`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack

from kgen.assets import include_dir
from kgen.cli import verify_library
from kgen.cli.context import CommandContext, open_command
from kgen.errors import OptionError, RecordError
from kgen.journal import Journal
from kgen.trial import ComputeSanitizer, HostRunner, Session, WorkerHandle, jobs_beside
from kgen.verify import Checked, Checker
from kgen.worker import Setup


def run(options: argparse.Namespace) -> int:
    """Print one verdict per line; 1 if any kernel is wrong.

    Raises:
        OptionError: If options contradict each other.
        RecordError: If the journal has no record of --record.
    """
    if options.library:
        return verify_library.run(options, _print)
    if options.array is not None:
        raise OptionError("--array N adds problems to those of --library; add --library")
    if options.record and options.problem:
        raise OptionError("--record verifies the record's own problem; leave out --problem")
    wrong = checked = 0
    with open_command(options) as common, ExitStack() as stack:
        setup = Setup(
            common.entry.operator.name, common.paths, common.gpu, common.ordinal, options.seed
        )
        # Checked before any work.
        on_gpu = options.sanitize and not common.gpu.is_host
        sanitizer = ComputeSanitizer() if on_gpu else None
        worker = stack.enter_context(WorkerHandle(setup))
        host_runner = None
        if options.record or on_gpu:
            jobs = jobs_beside(len(os.sched_getaffinity(0)) - 1)
            host_runner = stack.enter_context(HostRunner(setup, include_dir(), jobs))
        checkers = [
            Checker(_session(common, name, worker), setup, host_runner, sanitizer)
            for name in common.passes
        ]
        for result in _results(options, common, checkers):
            checked += 1
            wrong += not result.ok
            _print(result)
        print(
            f"{checked - wrong} of {checked} kernels compute {common.entry.operator.name} on "
            f"{common.gpu.title}"
        )
    return 1 if wrong else 0


def _session(common: CommandContext, pass_name: str, worker: WorkerHandle) -> Session:
    journal = common.reports / f"{common.gpu.name}.trials.jsonl"
    return Session(common.entry, pass_name, common.gpu, common.compiler, journal, worker)


def _results(
    options: argparse.Namespace, common: CommandContext, checkers: list[Checker]
) -> Iterator[Checked]:
    for checker in checkers:
        if options.record:
            record = checker.find(options.record)  # None: the record may be of the other pass
            if record is not None:
                yield checker.record(record)
                return
            continue
        for problem in common.problems[checker.session.pass_name]:
            yield from checker.problem(problem)
    if options.record:
        raise _no_record(options.record, common)


def _no_record(record_id: str, common: CommandContext) -> RecordError:
    """The error about a missing record; it says if another GPU's journal has the record."""
    journal = common.reports / f"{common.gpu.name}.trials.jsonl"
    where = f"{journal} has no {' or '.join(common.passes)} record '{record_id}'"
    if not journal.is_file():
        where = f"there is no journal {journal}"
    ending = ".trials.jsonl"
    for other in sorted(common.reports.glob(f"*{ending}")):
        if other != journal and any(r.id == record_id for r in Journal(other).read()):
            gpu = other.name.removesuffix(ending)
            return RecordError(f"{where}\n  {other} has it; add --gpu {gpu}")
    return RecordError(f"{where}\n  'kgen report --problem NAME' shows the ids of records")


def _print(result: Checked) -> None:
    outcome = result.outcome
    worst = max((a.error / a.bound for a in outcome.accuracy if a.bound), default=None)
    share = f"error {100 * worst:.0f} % of its bound" if worst is not None else ""
    print(f"{outcome.fate.value:<12} {result.problem}  {result.config.label}  {share}")
    if not result.ok:
        print("  " + outcome.reason.replace("\n", "\n  "))
        return
    evidence = outcome.evidence
    if evidence is not None and evidence.skipped:
        print(f"  skipped: {', '.join(evidence.skipped)}")
    if evidence is not None and (evidence.host or evidence.host_missing):
        print(
            f"  device: {len(evidence.tried)} input sets x {evidence.launches} launches, "
            + ("the same bits" if evidence.bitwise else "each within the bound")
        )
        for run in evidence.host:
            print(
                f"  host: {len(run.tried)} input sets x {len(run.orders)} thread orders, "
                f"{run.compiler}"
            )
        if evidence.host_missing:
            print(f"  host: {evidence.host_missing}")
    if result.tools:
        print(f"  compute-sanitizer: {', '.join(result.tools)} found nothing")
