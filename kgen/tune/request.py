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
from kgen.model.record import COLD, Fate, Record, Timing
from kgen.model.space import Variant
from kgen.search.feasible import Refusal


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running tune, for a display.

    Attributes:
        problem: The problem being searched.
        index: Its place, from 1.
        count: Number of problems.
        stage: `search`, `finals`, `safe`, `host runs` or `done`.
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


def _silent(said: object) -> None:
    """Ignore it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a trial may take before it is ended.

    Attributes:
        trial_s: Seconds, from the request to the verdict; the first trial of a problem draws its
            inputs and evaluates the oracle in that time, too.
        memory_bytes: Device memory of all trials; None for all there is.
    """

    trial_s: float = 30.0
    memory_bytes: int | None = None


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
        l2: `cold` or `warm`: what L2 holds while a kernel is timed.
        on_progress: Called after every trial and stage.
        on_settled: Called with the result so far, each time that another problem's winner is
            settled and not all are: with the safe variant and the settled problems alone, in their
            order. The whole is what `tune` returns.
        limits: Of a trial.
        retry: Try again what earlier tunes saw crash or run out of time; without it, such configs
            are quarantined as long as they render to the same code.
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
    l2: str = COLD
    on_progress: Callable[[Progress], None] = _silent
    on_settled: Callable[[TuneResult], None] = _silent
    limits: Limits = field(default_factory=Limits)
    retry: bool = False


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
        finalists: Certified configs, best first; their `timing` is the one of the last round.
        peers: Times of the peers, from the last round.
        peer_errors: Why a peer has no time.
        clocks: Clock state around the last round; `slowed` if power or heat held them down.
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
    finalists: tuple[Finalist, ...]
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

    @property
    def winner(self) -> Finalist:
        """The chosen finalist."""
        return self.finalists[0]

    @property
    def runner_up(self) -> Finalist | None:
        """The next best, if there was one."""
        return self.finalists[1] if len(self.finalists) > 1 else None


@dataclass(frozen=True)
class SafeResult:
    """The safe variant for one combination of dtypes.

    Attributes:
        record: That it was verified; None for a combination that is not run (`SafeCertificates`).
    """

    dtypes: Mapping[str, str]
    variant: Variant
    config: Config
    rendered: Rendered
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
