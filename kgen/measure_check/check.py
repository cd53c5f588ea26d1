"""Tune repeatedly without records, then time the winners against themselves and each other."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.errors import WorkerError
from kgen.measure.stats import paired_difference
from kgen.measure_check.model import (
    LibraryCall,
    ProblemQuality,
    Quality,
    SameKernel,
    SameRun,
    TunedWinner,
)
from kgen.model.problem import Problem
from kgen.trial import WorkerHandle
from kgen.tune import (
    Finalist,
    PassPublished,
    PassResult,
    PublishEvent,
    TuneRequest,
    journal_path,
    study_path,
    tune_and_publish,
)
from kgen.worker import Candidate, Finals, FinalsOutcome, Setup

CONTENDERS = 4
"""Names of one kernel in a comparison: two independent pairs in four positions."""


@dataclass(frozen=True)
class MeasureCheck:
    """The request of `kgen measure-check`.

    Attributes:
        tune: The tune to repeat; each repetition has a seed, a journal and a study of its own.
        tunes: Number of independent tunes.
        runs: Number of comparisons of a kernel with itself.
    """

    tune: TuneRequest
    tunes: int
    runs: int


@dataclass(frozen=True)
class _Subject:
    """One problem with the winners of all tunes and the results of the runs."""

    pass_name: str
    problem: Problem
    seeds: tuple[int, ...]
    winners: tuple[Finalist, ...]
    same: list[FinalsOutcome]
    field: list[FinalsOutcome]

    @property
    def distinct(self) -> list[Finalist]:
        """The distinct winners, that of the first tune first."""
        return list({w.config.digest: w for w in self.winners}.values())


def check_quality(job: MeasureCheck) -> Generator[PublishEvent | str, None, Quality]:
    """Measure the repeatability; writes only to a temporary folder.

    Yields:
        The events of each tune, and a line at the start of each step.
    Returns:
        The findings, at the end of the events.
    Raises:
        TuneError, WorkerError, UserError: See `tune`.
    """
    with tempfile.TemporaryDirectory(prefix="kgen-measure-check-") as folder:
        tuned: list[list[PassResult]] = []
        for index in range(job.tunes):
            yield f"tune {index + 1} of {job.tunes}, seed {job.tune.seed + index}"
            results = yield from _tune(job, index, Path(folder))
            tuned.append(results)
        subjects = _subjects(tuned)
        for run in range(job.runs):
            yield f"run {run + 1} of {job.runs}: each winner against itself and the others"
            _run(job, subjects, job.tune.seed + run, _out(Path(folder), 0))
    return Quality(
        operator=job.tune.entry.operator.name,
        gpu=job.tune.gpu.name,
        l2=job.tune.l2,
        environment=dict(tuned[0][0].environment),
        tunes=job.tunes,
        runs=job.runs,
        problems=tuple(_found(job, subject) for subject in subjects),
    )


def _out(folder: Path, index: int) -> Path:
    return folder / f"tune{index}"


def _tune(
    job: MeasureCheck, index: int, folder: Path
) -> Generator[PublishEvent, None, list[PassResult]]:
    """Run one tune with a journal and a study of its own; kernels come from the cache."""
    out = _out(folder, index)
    reports = out / "reports"
    request = replace(
        job.tune,
        journal=journal_path(reports, job.tune.gpu),
        study=study_path(reports, job.tune.gpu),
        seed=job.tune.seed + index,
        against=(),
    )
    results = []
    with closing(tune_and_publish(request, out, reports)) as events:
        for event in events:
            if isinstance(event, PassPublished):
                results.append(event.result)
            yield event
    return results


def _subjects(tuned: Sequence[Sequence[PassResult]]) -> list[_Subject]:
    subjects = []
    for place, first in enumerate(tuned[0]):
        for index, found in enumerate(first.results):
            results = [tune[place] for tune in tuned]
            subjects.append(
                _Subject(
                    first.pass_name,
                    found.problem,
                    tuple(r.request.seed for r in results),
                    tuple(r.results[index].winner for r in results),
                    [],
                    [],
                )
            )
    return subjects


def _run(job: MeasureCheck, subjects: Sequence[_Subject], seed: int, library: Path) -> None:
    """Time every problem's winners in a new process, with a new context and new addresses."""
    tune = job.tune
    setup = Setup(tune.entry.operator.name, tune.paths, tune.gpu, tune.ordinal, seed, tune.l2)
    with WorkerHandle(setup) as worker:
        for subject in subjects:
            one = _candidate(subject.winners[0])
            same = Finals(subject.pass_name, subject.problem, (one,) * CONTENDERS, peers=())
            subject.same.append(worker.finals(same))
            distinct = tuple(_candidate(w) for w in subject.distinct)
            field = Finals(
                subject.pass_name, subject.problem, distinct, peers=(), library=str(library)
            )
            subject.field.append(worker.finals(field))


def _candidate(finalist: Finalist) -> Candidate:
    return Candidate(finalist.variant, finalist.config, finalist.artifact)


def _found(job: MeasureCheck, subject: _Subject) -> ProblemQuality:
    # Rounds stay paired when runs are concatenated.
    pooled = {
        w.config.digest: [us for field in subject.field for us in field.samples_us[i]]
        for i, w in enumerate(subject.distinct)
    }
    best = min(pooled.values(), key=statistics.median)
    winners = tuple(
        TunedWinner(
            seed=seed,
            config=w.config.label,
            digest=w.config.digest,
            trial_us=w.record.timing.median_us if w.record.timing else w.timing.median_us,
            final_us=w.timing.median_us,
            regret=paired_difference(pooled[w.config.digest], best),
        )
        for seed, w in zip(subject.seeds, subject.winners, strict=True)
    )
    first = subject.winners[0]
    runs = tuple(
        _same_run(job.tune.seed + run, outcome) for run, outcome in enumerate(subject.same)
    )
    return ProblemQuality(
        subject.pass_name,
        str(subject.problem),
        SameKernel(first.config.label, runs),
        winners,
        _library(subject, pooled[first.config.digest], first.timing.median_us),
    )


def _same_run(seed: int, outcome: FinalsOutcome) -> SameRun:
    samples = outcome.samples_us
    return SameRun(
        seed=seed,
        medians_us=tuple(t.median_us for t in outcome.timings),
        protocols=tuple(t.protocol for t in outcome.timings),
        differences=tuple(
            paired_difference(a, b) for a, b in zip(samples[::2], samples[1::2], strict=True)
        ),
        clocks=outcome.clocks,
    )


def _library(subject: _Subject, kernel: Sequence[float], final_us: float) -> LibraryCall:
    calls = [us for field in subject.field for us in field.library_us]
    timed = subject.field[0].library
    if timed is None:
        raise WorkerError(f"the library's function was not timed for {subject.problem}")
    return LibraryCall(
        kernel_us=statistics.median(kernel),
        library_us=statistics.median(calls),
        difference=paired_difference(calls, kernel),
        kernel_over_final=statistics.median(kernel) / final_us - 1,
        protocol=timed.protocol,
    )
