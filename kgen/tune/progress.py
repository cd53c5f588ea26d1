"""Compute the `Progress` of a problem's search."""

from __future__ import annotations

import time

from kgen.model.names import short_name
from kgen.model.problem import Problem
from kgen.tune.events import Progress
from kgen.tune.request import TuneRequest
from kgen.tune.search_state import SearchState


def progress_of(
    request: TuneRequest,
    pass_name: str,
    problem: Problem,
    state: SearchState,
    floor_us: float,
    deadline: float | None = None,
) -> Progress:
    """Summarise a search.

    Args:
        request: The tune.
        pass_name: Which pass is tuned.
        problem: One of the pass's problems.
        state: The state of the problem's search.
        floor_us: Least time of the problem.
        deadline: When the search ends, as of `time.monotonic`; None for never.
    """
    problems = request.problems[pass_name]
    ranking = state.ranking()
    best_us = state.best_us
    return Progress(
        problem=str(problem),
        index=problems.index(problem) + 1,
        count=len(problems),
        trials=sum(state.fates.values()),
        wanted=request.trials,
        fates=dict(state.fates),
        best_us=best_us,
        best=ranking[0].config.label if ranking else "",
        share=floor_us / best_us if floor_us and best_us else None,
        seconds_left=None if deadline is None else max(0.0, deadline - time.monotonic()),
        pass_name=pass_name,
        name=short_name(problem, request.entry.operator.signature),
    )
