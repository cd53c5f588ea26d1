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
from kgen.tune.progress import progress_of
from kgen.tune.request import TuneRequest
from kgen.tune.results import ProblemResult
from kgen.tune.search_loop import ProblemSearch
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
    """

    problem: Problem
    feasible: Feasible
    first: WarmStart
    deadline: float | None
    retry: bool


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

    Trials in the journal are not repeated. If the problem was searched before, this only runs
    finals, without the configs that were refused since.

    Args:
        session: Of the tune.
        request: The tune.
        task: The problem.
        builds_ahead: Builds of warm-start configs that were started earlier.
        copy_gbps: Bandwidth of the device, for the floor.
        between_trials: Returns events of other problems; called after every trial.
        before_finals: Called when the search has ended and the compiler becomes idle.
    Returns:
        The problem's result, at the end of the events.
    Raises:
        TuneError: If no config is verified.
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
    )
    state = search.state

    def progress(deadline: float | None = None) -> Progress:
        return progress_of(request, session.pass_name, problem, state, floor, deadline)

    yield ProblemStarted(progress(task.deadline), search.let_go)
    yield from between_trials()
    with closing(search.run()) as records:
        for record in records:
            yield TrialRecorded(record, progress(task.deadline))
            yield from between_trials()
    search_s = time.monotonic() - started
    before_finals(state)
    yield StageStarted("finals", progress())
    finalists, outcome = run_finals(session, problem, state, request.peers)
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
        search_s=search_s,
        compile_s=state.compile_s,
        new_trials=state.new_trials,
    )
