"""One problem of a tune: its search and its finals."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

from kgen.measure.floor import floor_us, rate_tflops
from kgen.model.problem import Problem
from kgen.search.feasible import Feasible
from kgen.trial import Session
from kgen.tune.builds_ahead import BuildsAhead
from kgen.tune.events import ProblemStarted, Progress, StageStarted, TrialRecorded, TuneEvent
from kgen.tune.finals import run_finals
from kgen.tune.joint import Joint
from kgen.tune.progress import progress_of
from kgen.tune.request import TuneRequest
from kgen.tune.results import ProblemResult
from kgen.tune.search_loop import OVERTIME_S, ProblemSearch
from kgen.tune.search_state import SearchState
from kgen.tune.warm_start import WarmStart


@dataclass(frozen=True)
class ProblemTask:
    """One problem to tune.

    Attributes:
        problem: The problem.
        feasible: Its configs.
        first: The warm start of its search.
        deadline: When the search ends if it has a result, as of `time.monotonic`; None for never.
        retry: Try again the configs that crashed or timed out in earlier tunes.
        joint: The work with other processes; None: this one works alone.
        overtime_s: How long past the deadline it waits for the first config of a variant.
    """

    problem: Problem
    feasible: Feasible
    first: WarmStart
    deadline: float | None
    retry: bool
    joint: Joint | None = None
    overtime_s: float = OVERTIME_S


@dataclass(frozen=True)
class Searched:
    """A problem whose search has ended.

    Attributes:
        state: Its records and totals.
        floor_us: Least time of the problem, microseconds.
        seconds: Wall-clock seconds of the search.
    """

    state: SearchState
    floor_us: float
    seconds: float


def search_problem(
    session: Session,
    request: TuneRequest,
    task: ProblemTask,
    builds_ahead: BuildsAhead,
    copy_gbps: float,
    between_trials: Callable[[], Iterator[TuneEvent]] = lambda: iter(()),
) -> Generator[TuneEvent, None, Searched]:
    """Search a problem. Trials in the journal are not repeated.

    Args:
        session: The session of the tune.
        request: The tune.
        task: The problem.
        builds_ahead: Builds of warm-start configs that were started earlier.
        copy_gbps: Bandwidth of the device, for the floor.
        between_trials: Returns events of other problems; called after every trial.
    Returns:
        What the search found, at the end of the events.
    """
    problem = task.problem
    cost = request.entry.operator.cost(session.pass_name, problem)
    # The peak rate of the host is unknown, so its floor counts bytes only.
    floor = floor_us(cost, copy_gbps, rate_tflops(cost, request.gpu))
    started = time.monotonic()
    search = ProblemSearch(
        session,
        request,
        problem,
        task.feasible,
        task.first,
        builds_ahead,
        trials=request.trials,
        deadline=task.deadline,
        retry=task.retry,
        joint=task.joint,
        overtime_s=task.overtime_s,
    )

    def progress() -> Progress:
        return progress_of(
            request, session.pass_name, problem, search.state, floor, task.deadline
        )

    yield ProblemStarted(progress(), search.not_reused, search.state.timed_again)
    yield from between_trials()
    with closing(search.run()) as records:
        for record in records:
            yield TrialRecorded(record, progress())
            yield from between_trials()
    return Searched(search.state, floor, time.monotonic() - started)


def tune_problem(
    session: Session,
    request: TuneRequest,
    task: ProblemTask,
    builds_ahead: BuildsAhead,
    copy_gbps: float,
    between_trials: Callable[[], Iterator[TuneEvent]],
    before_finals: Callable[[SearchState], None],
) -> Generator[TuneEvent, None, ProblemResult]:
    """Search a problem, and run the finals among the verified configs.

    If the problem was searched before, this only runs finals, without the configs that were refused
    since.

    Args:
        session, request, task, builds_ahead, copy_gbps, between_trials: See `search_problem`.
        before_finals: Called when the search has ended and the compiler becomes idle.
    Returns:
        The problem's result, at the end of the events.
    Raises:
        TuneError: If no config is verified.
    """
    problem = task.problem
    searched = yield from search_problem(
        session, request, task, builds_ahead, copy_gbps, between_trials
    )
    state = searched.state
    before_finals(state)
    floor = searched.floor_us
    yield StageStarted(
        "finals", progress_of(request, session.pass_name, problem, state, floor)
    )
    finalists, outcome = run_finals(session, problem, state, request.against)
    return ProblemResult(
        problem=problem,
        finalists=finalists,
        peers=outcome.peers,
        peer_errors=outcome.peer_errors,
        clocks=outcome.clocks,
        space_size=task.feasible.size,
        feasible=len(task.feasible.configs),
        refusals=task.feasible.refusals,
        fates=dict(state.fates),
        reasons=dict(state.reasons),
        floor_us=floor,
        search_s=searched.seconds,
        compile_s=state.compile_s,
        new_trials=state.new_trials,
        timed_again=state.timed_again,
    )
