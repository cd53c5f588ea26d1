"""Tells the caller how a tune goes."""

from __future__ import annotations

import time

from kgen.model.problem import Problem
from kgen.tune.request import Progress, TuneRequest
from kgen.tune.search_loop import Books


def say_stage(request: TuneRequest, index: int, stage: str) -> None:
    """Say that a stage begins that is of no one problem; `index` problems have been searched."""
    say(request, "", index, stage, Books())


def say_problem(
    request: TuneRequest,
    problem: Problem,
    stage: str,
    books: Books,
    floor: float,
    deadline: float | None = None,
) -> None:
    """Say how far a problem is."""
    index = request.problems.index(problem) + 1
    say(request, str(problem), index, stage, books, floor, deadline)


def say(
    request: TuneRequest,
    problem: str,
    index: int,
    stage: str,
    books: Books,
    floor: float | None = None,
    deadline: float | None = None,
) -> None:
    """Fill in a `Progress`, and hand it over."""
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
