"""What a tune is asked for, what it says on the way, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.model.artifact import Artifact, Rendered
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Plan
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record, Timing
from kgen.model.space import Variant
from kgen.search.feasible import Refusal


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running tune, for a display.

    Attributes:
        problem: The problem being searched.
        index: Its place, from 1.
        count: Number of problems.
        stage: `search`, `finals`, `safe` or `done`.
        trials: Trials told so far for this problem, known ones included.
        wanted: Trials asked for.
        fates: Number of trials by fate.
        best_us: Best time so far, microseconds.
        best: The config that reached it.
        share: Share of the floor of that time, 0..1; None where the floor is unknown.
        seconds_left: Of the time budget; None without one.
    """

    problem: str
    index: int
    count: int
    stage: str
    trials: int
    wanted: int
    fates: Mapping[Fate, int]
    best_us: float | None
    best: str
    share: float | None
    seconds_left: float | None


def _silent(progress: Progress) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class TuneRequest:
    """One tune of one pass.

    Attributes:
        entry: The operator with its space and templates.
        pass_name: `forward` or `backward`.
        problems: Problems, in the order in which they are searched.
        gpu: Profile of the device to tune on.
        ordinal: CUDA device ordinal.
        compiler: Back end; decides the cache too.
        journal: Path of the trial journal.
        study: Path of the Optuna journal file.
        trials: Trials per problem, at most.
        time_s: Seconds for all searches together, or None.
        seed: Of proposals and inputs.
        paths: The `--path` folders, for the worker.
        peers: Whether to time the operator's peers beside the winner.
        on_progress: Called after every trial and stage.
    """

    entry: Entry
    pass_name: str
    problems: tuple[Problem, ...]
    gpu: GpuProfile
    ordinal: int
    compiler: Compiler
    journal: Path
    study: Path
    trials: int
    time_s: float | None
    seed: int
    paths: tuple[str, ...]
    peers: bool = True
    on_progress: Callable[[Progress], None] = _silent


@dataclass(frozen=True)
class Finalist:
    """A candidate of the last round."""

    variant: Variant
    config: Config
    plan: Plan
    rendered: Rendered
    artifact: Artifact
    record: Record
    timing: Timing
    occupancy: float | None


@dataclass(frozen=True)
class ProblemResult:
    """What tuning one problem found.

    Attributes:
        problem: The problem.
        winner: The chosen finalist; its `timing` is the one of the last round.
        runner_up: The next best, if there was one.
        peers: Times of the peers, from the last round.
        peer_errors: Why a peer has no time.
        clocks: Clock state around the last round.
        space_size: Configs before any rule.
        feasible: Feasible configs.
        refusals: Why configs were infeasible.
        fates: Trials by fate.
        reasons: Refused trials by reason (first line), with their number.
        floor_us: Least time by bytes and operations, microseconds.
        search_s: Wall-clock seconds of the search.
        compile_s: Seconds of compilation, summed over threads.
        new_trials: Trials run now (the rest was known from the journal).
    """

    problem: Problem
    winner: Finalist
    runner_up: Finalist | None
    peers: Mapping[str, Timing]
    peer_errors: Mapping[str, str]
    clocks: Mapping[str, str]
    space_size: int
    feasible: int
    refusals: tuple[Refusal, ...]
    fates: Mapping[Fate, int]
    reasons: Mapping[str, int]
    floor_us: float
    search_s: float
    compile_s: float
    new_trials: int


@dataclass(frozen=True)
class SafeResult:
    """The safe variant, built for one combination of dtypes.

    Attributes:
        record: That it was verified; None for a combination that is not run (`verify_safe`).
    """

    dtypes: Mapping[str, str]
    variant: Variant
    config: Config
    rendered: Rendered
    artifact: Artifact
    record: Record | None


@dataclass(frozen=True)
class TuneResult:
    """Everything that emission and the report need."""

    request: TuneRequest
    environment: Mapping[str, str]
    copy_gbps: float
    results: tuple[ProblemResult, ...]
    safe: tuple[SafeResult, ...]
    worker_restarts: int
    seconds: float = field(default=0.0)
