"""The whole of `kgen tune`: every pass in turn, each problem published as soon as it is settled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.errors import StorageError
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.tune import Limits, Progress, TuneRequest, TuneResult, tune
from kgen.workflow.publish import Published, publish

# The host searches a small space for its own default; a GPU's trial takes milliseconds.
DEFAULT_TRIALS = 160
DEFAULT_HOST_TRIALS = 12


@dataclass(frozen=True)
class TuneJob:
    """What `kgen tune` was asked for; see `TuneRequest` for the fields they share."""

    entry: Entry
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]  # by pass
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    out: Path
    reports: Path
    trials: int | None
    time_s: float | None
    seed: int
    paths: tuple[str, ...]
    peers: bool
    l2: str
    on_progress: Callable[[Progress], None]
    limits: Limits = field(default_factory=Limits)
    retry: bool = False


def run_job(job: TuneJob) -> Iterator[tuple[TuneResult, Published]]:
    """Tune pass after pass; publish after each problem, and yield after each pass.

    A tune that dies leaves a library with the problems before; the rest of its rows, and of its
    report, are as they were.

    Raises:
        StorageError: If the output folder cannot be written; found out before anything runs.
        TuneError, WorkerError, UserError: See `tune`.
    """
    check_writable(job.reports)
    default = DEFAULT_HOST_TRIALS if job.gpu.is_host else DEFAULT_TRIALS

    def on_settled(so_far: TuneResult) -> None:
        publish(so_far, job.out, job.reports)

    for pass_name in job.passes:
        result = tune(
            TuneRequest(
                entry=job.entry,
                pass_name=pass_name,
                problems=job.problems[pass_name],
                gpu=job.gpu,
                ordinal=job.ordinal,
                compiler=job.compiler,
                journal=job.reports / f"{job.gpu.name}.trials.jsonl",
                study=job.reports / f"{job.gpu.name}.optuna.log",
                trials=job.trials or default,
                time_s=None if job.time_s is None else job.time_s / len(job.passes),
                seed=job.seed,
                paths=job.paths,
                peers=job.peers,
                l2=job.l2,
                on_progress=job.on_progress,
                on_settled=on_settled,
                limits=job.limits,
                retry=job.retry,
            )
        )
        yield result, publish(result, job.out, job.reports)


def check_writable(folder: Path) -> None:
    """Make the folder now: a tune must not end with nowhere to write."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise StorageError(
            f"{folder}: the output folder cannot be made: {problem.strerror}\n"
            "  choose another with --out DIR"
        ) from None
    if not os.access(folder, os.W_OK):
        raise StorageError(
            f"{folder}: no permission to write\n  choose another output folder with --out DIR"
        )
