"""The events that a tune yields: one frozen object per step that begins or ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kgen.model.record import Fate, Record
from kgen.tune.results import PassResult

# `finals`: certify and compare a problem's best configs. `safe`: certify the safe variant.
# `host runs`: wait for the winners' runs on the host layer.
Stage: TypeAlias = Literal["finals", "safe", "host runs"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the search of a problem.

    Attributes:
        problem: The problem.
        index: Its place, from 1.
        count: Number of problems.
        trials: Trials so far, including those that the journal already held.
        wanted: Limit on trials.
        fates: Number of trials by fate.
        best_us: Best time so far, microseconds.
        best: The config that reached it.
        share: Share of the floor of that time, 0..1; None where the floor is unknown.
        seconds_left: The seconds left of the time budget; None without one.
        pass_name: The pass that is tuned.
        name: The problem's short name.
    """

    problem: str
    index: int
    count: int
    trials: int
    wanted: int
    fates: Mapping[Fate, int]
    best_us: float | None
    best: str
    share: float | None
    seconds_left: float | None
    pass_name: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ProblemStarted:
    """A problem's search begins; `progress` counts the trials that the journal already holds.

    Attributes:
        progress: The progress of the problem.
        not_reused: Number of the journal's records that cannot be reused, by reason.
        timed_again: Number of records without a time on trained inputs that could win and were
            timed again.
    """

    progress: Progress
    not_reused: Mapping[str, int] = field(default_factory=dict)
    timed_again: int = 0


@dataclass(frozen=True, slots=True)
class TrialRecorded:
    """A trial has ended and its record is in the journal."""

    record: Record
    progress: Progress


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A stage begins; `progress` is None for a stage that belongs to no single problem."""

    stage: Stage
    progress: Progress | None = None


@dataclass(frozen=True, slots=True)
class StageAdvanced:
    """Another of the safe variant's kernels, one per combination of dtypes, is ready.

    Attributes:
        what: The work: `compiled` or `verified`.
        done: Number of kernels so far.
        count: The total number; 0 while it is not known.
    """

    what: Literal["compiled", "verified"]
    done: int
    count: int = 0


@dataclass(frozen=True, slots=True)
class ProblemConfirmed:
    """Another problem is confirmed; `so_far` holds all confirmed problems.

    Yielded only after the safe variant is certified for the tuned dtypes: a row needs its safe
    kernel. `so_far` has the other safe kernels that are certified by then.
    """

    so_far: PassResult


@dataclass(frozen=True, slots=True)
class SafeCertified:
    """More safe kernels are certified; `so_far` holds them, and all confirmed problems."""

    so_far: PassResult


@dataclass(frozen=True, slots=True)
class PassDone:
    """Every problem of a pass is confirmed."""

    result: PassResult


TuneEvent: TypeAlias = (
    ProblemStarted
    | TrialRecorded
    | StageStarted
    | StageAdvanced
    | ProblemConfirmed
    | SafeCertified
    | PassDone
)


def pass_results(events: Iterable[object]) -> list[PassResult]:
    """Run a tune to its end, and return the result of each pass."""
    return [event.result for event in events if isinstance(event, PassDone)]
