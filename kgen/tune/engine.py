"""The whole tune of one pass: every problem in turn, on one worker."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from kgen.assets import include_dir
from kgen.errors import KgenError
from kgen.measure.floor import floor_us, rate_tflops
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.operators.base import Operator
from kgen.render import check_template
from kgen.search.feasible import Feasible, enumerate_feasible
from kgen.tune.finals import play_finals
from kgen.tune.request import ProblemResult, Progress, TuneRequest, TuneResult
from kgen.tune.safe import SafeCertificates
from kgen.tune.search_loop import Books, search_problem
from kgen.tune.settle import Settlements
from kgen.worker import HostProver, Session, Setup, WorkerHandle


def tune(request: TuneRequest) -> TuneResult:
    """Tune one pass of one operator for several problems on one GPU.

    Every trial is in the journal when this returns or raises; the same request resumes. What is
    settled goes to `request.on_settled` at once, so a tune that dies leaves the problems before.

    Raises:
        TuneError: If a problem ends with no verified config, or the safe variant is not right.
        WorkerError: If the device cannot be used.
        EmptySpaceError, TemplateError, StorageError: As named.
    """
    started = time.monotonic()
    entry = request.entry
    pass_ = entry.operator.signature.pass_named(request.pass_name)
    variants = entry.space.of_pass(request.pass_name)
    for variant in variants:
        check_template(entry.templates / variant.template, variant, entry.operator.signature)
    # All spaces are enumerated first: an empty one is the user's to mend, before any work.
    spaces = [enumerate_feasible(variants, pass_, p, request.gpu) for p in request.problems]
    if not request.journal.exists():
        # The study is a view of the journal; alone it would name configs done that nobody knows.
        request.study.unlink(missing_ok=True)
    setup = Setup(
        entry.operator.name,
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
            entry,
            request.pass_name,
            request.gpu,
            request.compiler,
            request.journal,
            worker,
            request.l2,
        )
        copy_gbps = session.probe()
        safe: SafeCertificates | None = None

        def result_of(results: tuple[ProblemResult, ...], safe: SafeCertificates) -> TuneResult:
            return TuneResult(
                request,
                dict(session.environment),
                copy_gbps,
                results,
                safe.results(),
                worker.restarts,
                time.monotonic() - started,
            )

        def on_settled(settled: tuple[ProblemResult, ...]) -> bool:
            if safe is None or not safe.done:  # rows need something to fall back on
                return False
            if len(settled) < len(spaces):  # all of them are what this returns
                request.on_settled(result_of(settled, safe))
            return True

        settlements = Settlements(session, prover, on_settled)
        searching = time.monotonic()
        results: list[ProblemResult] = []
        try:
            for index, (problem, feasible) in enumerate(zip(request.problems, spaces, strict=True)):
                deadline = None
                if request.time_s is not None:  # what earlier problems left over goes to the rest
                    left = searching + request.time_s - time.monotonic()
                    deadline = time.monotonic() + max(0.0, left) / (len(spaces) - index)
                results.append(
                    _tune_problem(
                        session,
                        request,
                        problem,
                        feasible,
                        index,
                        deadline,
                        results,
                        copy_gbps,
                        settlements.collect,
                    )
                )
                interlude = time.monotonic()
                settlements.add(results[-1])
                if safe is None:
                    _say(request, "", index + 1, "safe", Books(), None, None)
                    safe = SafeCertificates(session, prover)
                if request.gpu.is_host:  # beside the next search it would disturb what is timed
                    _say(request, "", index + 1, "host runs", Books(), None, None)
                    settlements.collect(wait=True)
                searching += time.monotonic() - interlude  # the time limit is the searches' alone
        except KgenError:
            if safe is not None:  # the problems before the one that failed are not lost with it
                _say(request, "", len(results), "host runs", Books(), None, None)
                safe.results()
                settlements.collect(wait=True)
            raise
        _say(request, "", len(results), "host runs", Books(), None, None)
        assert safe is not None  # there is a problem at least
        safe.results()
        settled = settlements.finish()
        _say(request, "", len(results), "done", Books(), None, None)
        return result_of(settled, safe)


def _tune_problem(
    session: Session,
    request: TuneRequest,
    problem: Problem,
    feasible: Feasible,
    index: int,
    deadline: float | None,
    earlier: Sequence[ProblemResult],
    copy_gbps: float,
    between_trials: Callable[[], None],
) -> ProblemResult:
    floor = problem_floor_us(
        request.entry.operator, request.pass_name, problem, request.gpu, copy_gbps
    )
    started = time.monotonic()

    def on_trial(books: Books) -> None:
        _say(request, str(problem), index + 1, "search", books, floor, deadline)
        between_trials()

    books = search_problem(
        session,
        request,
        problem,
        feasible,
        _first_trials(session, feasible, earlier),
        deadline,
        on_trial,
    )
    search_s = time.monotonic() - started
    _say(request, str(problem), index + 1, "finals", books, floor, None)
    finalists, outcome = play_finals(session, problem, books, request.peers)
    return ProblemResult(
        problem=problem,
        finalists=finalists,
        peers=outcome.peers,
        peer_errors=outcome.peer_errors,
        clocks=outcome.clocks,
        space_size=feasible.size,
        feasible=len(feasible.configs),
        refusals=feasible.refusals,
        fates=dict(books.fates),
        reasons=dict(books.reasons),
        floor_us=floor,
        search_s=search_s,
        compile_s=books.compile_s,
        new_trials=books.new_trials,
    )


def _proofs_at_once(gpu: GpuProfile) -> int:
    """Host runs beside the search: a few where there are cores for them. On the host they come
    after it, when nothing is timed any more."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(4, cores if gpu.is_host else cores // 4))


def problem_floor_us(
    operator: Operator, pass_name: str, problem: Problem, gpu: GpuProfile, copy_gbps: float
) -> float:
    """Least time of a problem: bytes over measured copy bandwidth, operations over peak.

    The host's peak is not known, so bytes alone decide there.
    """
    cost = operator.cost(pass_name, problem)
    return floor_us(cost, copy_gbps, rate_tflops(cost, gpu))


def _first_trials(
    session: Session, feasible: Feasible, earlier: Sequence[ProblemResult]
) -> list[Config]:
    """Winners of the problems tuned before (nearest last problem first), then the author's guesses.

    Another shape's winner is a good first trial and a bad answer: copying one between GPUs costs
    up to 1.5 x, so it is tried, not trusted.
    """
    allowed = set(feasible.configs)
    guesses = [r.winner.config for r in reversed(earlier)]
    for variant in session.entry.space.of_pass(session.pass_name):
        guesses += variant.first
        guesses += [variant.safe] if variant.safe else []
    return [c for c in dict.fromkeys(guesses) if c in allowed]


def _say(
    request: TuneRequest,
    problem: str,
    index: int,
    stage: str,
    books: Books,
    floor: float | None,
    deadline: float | None,
) -> None:
    ranking = books.ranking()
    best_us = books.best_us
    request.on_progress(
        Progress(
            problem=problem,
            index=index,
            count=len(request.problems),
            stage=stage,
            trials=sum(books.fates.values()),
            wanted=request.trials,
            fates=dict(books.fates),
            best_us=best_us,
            best=ranking[0].config.label if ranking else "",
            share=floor / best_us if floor and best_us else None,
            seconds_left=None if deadline is None else max(0.0, deadline - time.monotonic()),
        )
    )
