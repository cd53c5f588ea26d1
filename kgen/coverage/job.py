"""`kgen coverage` as a whole: ask the library, verify and time its kernels, search a sample."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.bench.prepare import certified, least_us
from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.coverage.model import NO_KERNEL, CoverageReport, CoveredProblem
from kgen.emit import LoadedLibrary, Served
from kgen.errors import KgenError
from kgen.measure.stats import paired_difference
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.report.environment import environment_of
from kgen.search.declared import as_declared
from kgen.tune import Sweep, TuneRequest, default_trials, journal_path, open_sweep
from kgen.worker import CallCosts, Finals

RIVALS = 3  # best configs of a search that are timed beside the kernel that serves a problem


@dataclass(frozen=True)
class Timing:
    """The settings of the times in one coverage: device, compiler, peers, searches.

    Attributes:
        ordinal: CUDA device ordinal.
        compiler: Back end.
        against: Names of peers; None: all peers.
        sample: Number of problems per pass that are searched, for the loss.
        search_s: Seconds for each search.
        first_calls: Whether to time first calls.
        time_s: Seconds after which no further problem is timed; each pass has an equal share. The
            problems are then taken in an order drawn with the seed. None: all problems are timed,
            in the order of `problems`.
    """

    ordinal: int
    compiler: Compiler
    against: tuple[str, ...] | None
    sample: int
    search_s: float
    first_calls: bool
    time_s: float | None = None


@dataclass(frozen=True)
class CoverageRequest:
    """The request of a coverage of one operator on one GPU.

    Attributes:
        entry: The operator with its space and templates.
        passes: Passes, in order.
        problems: Problems by pass, in order.
        populations: Sources of the problems.
        gpu: Profile of the GPU.
        timing: Settings of the timing. None: only ask which kernel serves a problem; the GPU need
            not be in this machine.
        out: Folder of the library.
        seed: The seed of the inputs, and of the choice of the sample.
        paths: The `--path` folders, for the worker.
    """

    entry: Entry
    passes: tuple[str, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    populations: tuple[str, ...]
    gpu: GpuProfile
    timing: Timing | None
    out: Path
    seed: int
    paths: tuple[str, ...]


def coverage(request: CoverageRequest) -> Iterator[CoverageReport]:
    """Find out which kernel serves each problem, and time it.

    A kernel that is wrong or does not run is a finding: `failed` describes it, and the next problem
    follows. Problems for which no time is left come at the end, with their step only.

    Yields:
        The report so far, once for each problem, the newest problem last.
    Raises:
        CatalogueError: If there is no library.
        ProblemError: If the library does not have the operator.
        WorkerError: If the device cannot be used.
    """
    report = CoverageReport(request.entry.operator.name, request.gpu.name, request.populations,
                            None, ())
    with LoadedLibrary.open(request.out, "--out") as library:
        answers = {
            (name, problem): library.served(
                request.entry.operator.name, name, problem, request.gpu)
            for name in request.passes
            for problem in request.problems[name]
        }
    asked: list[CoveredProblem] = []
    for name in request.passes:
        problems = request.problems[name]
        if (timing := request.timing) is not None:
            last = report
            for last in _timed_pass(request, timing, name, answers, report):
                yield last
            reached = len(last.problems) - len(report.problems)
            problems, report = in_order(problems, timing, request.seed)[reached:], last
        asked += (_asked(name, problem, answers[name, problem]) for problem in problems)
    for row in asked:
        report = replace(report, problems=(*report.problems, row))
        yield report


def _timed_pass(
    request: CoverageRequest, timing: Timing, name: str,
    answers: Mapping[tuple[str, Problem], Served | None], report: CoverageReport,
) -> Iterator[CoverageReport]:
    """Time the problems of one pass until its share of the time is used up, at least one."""
    with (
        tempfile.TemporaryDirectory(prefix="kgen-coverage-") as folder,
        open_sweep(_tune_request(request, timing, name, Path(folder)), name) as sweep,
    ):
        sample = _sample(request, timing, name)
        report = replace(report, environment=environment_of(
            sweep.session.environment, timing.compiler, sweep.copy_gbps, {}))
        share = None if timing.time_s is None else timing.time_s / len(request.passes)
        began = time.monotonic()
        for problem in in_order(request.problems[name], timing, request.seed):
            row = _measured(request, timing, sweep, problem, answers[name, problem],
                            problem in sample)
            report = replace(report, problems=(*report.problems, row))
            yield report
            if share is not None and time.monotonic() - began >= share:
                return


def in_order(
    problems: tuple[Problem, ...], timing: Timing, seed: int
) -> tuple[Problem, ...]:
    """The problems in the order in which they are timed.

    With a limited time the order is drawn, so that the problems that were reached represent all.
    """
    return problems if timing.time_s is None else _drawn(problems, seed)


def _drawn(problems: tuple[Problem, ...], seed: int) -> tuple[Problem, ...]:
    """The problems in a random order that depends on the seed only."""
    return tuple(random.Random(seed).sample(problems, len(problems)))


def _tune_request(
    request: CoverageRequest, timing: Timing, pass_name: str, folder: Path
) -> TuneRequest:
    """A tune that only searches; its journal is in a folder that is removed afterwards."""
    return TuneRequest(
        entry=request.entry,
        passes=(pass_name,),
        problems={pass_name: request.problems[pass_name]},
        gpu=request.gpu,
        ordinal=timing.ordinal,
        compiler=timing.compiler,
        journal=journal_path(folder, request.gpu),
        study=folder / "coverage.optuna.log",
        trials=default_trials(request.gpu),
        time_s=None,
        seed=request.seed,
        paths=request.paths,
        against=timing.against,
    )


def _sample(request: CoverageRequest, timing: Timing, pass_name: str) -> frozenset[Problem]:
    """The problems that are searched: those that are timed first under a limited time."""
    return frozenset(_drawn(request.problems[pass_name], request.seed)[:timing.sample])


def _asked(pass_name: str, problem: Problem, answer: Served | None) -> CoveredProblem:
    if answer is None:
        return CoveredProblem(pass_name, str(problem), NO_KERNEL)
    return CoveredProblem(pass_name, str(problem), answer.step, answer.config.label)


def _measured(
    request: CoverageRequest, timing: Timing, sweep: Sweep, problem: Problem,
    answer: Served | None, search: bool,
) -> CoveredProblem:
    """Time the kernel that serves a problem, and search the problem if it is in the sample."""
    row = _asked(sweep.session.pass_name, problem, answer)
    if answer is None:
        return row
    config = as_declared(request.entry, sweep.session.pass_name, answer.config)
    if config is None:
        return replace(row, failed=f"the search space no longer contains {row.config}; "
                                   "run kgen emit")
    try:
        row = _timed(request, timing, sweep, problem, config, row)
        return _searched(timing, sweep, problem, config, row) if search else row
    except KgenError as trouble:
        return replace(row, failed=str(trouble).splitlines()[0])


def _timed(
    request: CoverageRequest, timing: Timing, sweep: Sweep, problem: Problem, config: Config,
    row: CoveredProblem,
) -> CoveredProblem:
    """Verify the kernel that serves a problem; time it, a call of the library and the peers."""
    session, library = sweep.session, str(request.out.resolve())
    row = replace(row, floor_us=least_us(session, problem, sweep.copy_gbps))
    if timing.first_calls:  # before any other call of the problem
        costs = CallCosts(session.pass_name, problem, (), library)
        row = replace(row, first_ms=session.worker.call_costs(costs).first_ms)
    ((candidate, _),) = certified(session, problem, [config])
    found = session.worker.finals(Finals(
        session.pass_name, problem, (candidate,), timing.against, library=library))
    ((kernel,), (ours,)), call = (found.timings, found.samples_us), found.library
    row = replace(row, kernel_us=kernel.median_us,
                  call_us=None if call is None else call.median_us)
    for other in kernel.others:
        row = replace(row, inputs=kernel.inputs, other_us=other.median_us)
    ratios = {name: 1 + paired_difference(samples, ours).median
              for name, samples in found.peer_samples_us.items()}
    if not ratios:
        return row
    peer = min(ratios, key=ratios.__getitem__)
    return replace(row, peer=peer, ratio=ratios[peer], peer_us=found.peers[peer].median_us)


def _searched(
    timing: Timing, sweep: Sweep, problem: Problem, config: Config, row: CoveredProblem
) -> CoveredProblem:
    """Search this problem, and time the best configs beside the config that serves it."""
    state = sweep.search(problem, [config], time.monotonic() + timing.search_s)
    entrants = list(dict.fromkeys([config, *(r.config for r in state.ranking()[:RIVALS])]))
    times = dict(zip(entrants, sweep.compare(problem, entrants), strict=True))
    best = min(entrants, key=times.__getitem__)
    return replace(row, best=best.label, best_us=times[best],
                   loss=times[config] / times[best] - 1)
