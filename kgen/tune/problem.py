"""One problem of a tune: its search and its finals."""

from __future__ import annotations

import time
from collections.abc import Callable

from kgen.measure.floor import floor_us, rate_tflops
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.operators.base import Operator
from kgen.search.feasible import Feasible
from kgen.tune.ahead import Ahead
from kgen.tune.display import say_problem
from kgen.tune.finals import play_finals
from kgen.tune.first import FirstTrials
from kgen.tune.request import ProblemResult, TuneRequest
from kgen.tune.search_loop import Books, search_problem
from kgen.worker import Session


def tune_problem(
    session: Session,
    request: TuneRequest,
    problem: Problem,
    feasible: Feasible,
    first: FirstTrials,
    ahead: Ahead,
    copy_gbps: float,
    deadline: float | None,
    between_trials: Callable[[], None],
    before_finals: Callable[[Books], None],
) -> ProblemResult:
    """Search a problem, and play the finals among what was verified.

    What the journal knows is not tried again, so for a problem that was searched before this plays
    the finals without those that were refused since.

    Args:
        session: Of the tune.
        request: The tune.
        problem: One of the request's.
        feasible: Its configs.
        first: What its search begins with.
        ahead: Where some of that may be built already.
        copy_gbps: Bandwidth of the device, for the floor.
        deadline: When the search ends if it has a result, as of `time.monotonic`; None for never.
        between_trials: Called after every trial.
        before_finals: Called when the search is over: the compiler is idle from then on.
    Raises:
        TuneError: If no config is verified.
    """
    floor = _floor_us(request.entry.operator, request.pass_name, problem, request.gpu, copy_gbps)
    started = time.monotonic()

    def on_trial(books: Books) -> None:
        say_problem(request, problem, "search", books, floor, deadline)
        between_trials()

    books = search_problem(
        session, request, problem, feasible, first, ahead, deadline, on_trial
    )
    search_s = time.monotonic() - started
    before_finals(books)
    say_problem(request, problem, "finals", books, floor)
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


def _floor_us(
    operator: Operator, pass_name: str, problem: Problem, gpu: GpuProfile, copy_gbps: float
) -> float:
    """Least time of a problem: bytes over measured copy bandwidth, operations over peak.

    The host's peak is not known, so bytes alone decide there.
    """
    cost = operator.cost(pass_name, problem)
    return floor_us(cost, copy_gbps, rate_tflops(cost, gpu))
