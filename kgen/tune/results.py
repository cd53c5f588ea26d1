"""Results of a tune: finalists, the result of a problem, safe kernels, the result of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kgen.model.artifact import Artifact, Rendered
from kgen.model.config import Config
from kgen.model.plan import Plan
from kgen.model.problem import Problem
from kgen.model.record import Fate, Record, Timing
from kgen.model.space import Variant
from kgen.search.feasible import Refusal
from kgen.tune.request import TuneRequest


@dataclass(frozen=True)
class Finalist:
    """A certified config of the last round.

    Attributes:
        variant: The config's variant.
        config: The config.
        plan: The launches for the problem.
        rendered: The source.
        artifact: The built module.
        record: The certificate.
        timing: The time in the last round of finals.
        occupancy: The occupancy of the first kernel, 0..1; None on the host.
    """

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
    """The result of tuning one problem.

    Attributes:
        problem: The problem.
        finalists: Certified configs, best first; their `timing` is the one of the last round.
        peers: Times of the peers, from the last round.
        peer_errors: Why a peer has no time.
        clocks: Clock state around the last round; `slowed` if power or heat held them down.
        space_size: Configs before any rule.
        feasible: Feasible configs.
        refusals: Why configs were infeasible.
        fates: Number of trials by fate.
        reasons: Number of refused trials by reason (first line).
        floor_us: Lower limit on the time from bytes and operations, microseconds.
        search_s: Wall-clock seconds of the search.
        compile_s: Seconds of compilation, summed over threads.
        new_trials: Trials of this run; the journal already held the others.
        timed_again: Records of earlier tunes that lacked the time on trained inputs and got it.
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
    timed_again: int = 0

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
        dtypes: The combination: dtype by name.
        variant: The safe variant.
        config: Its safe config.
        rendered: The source for this combination.
        record: The certificate; None for a combination that is not run, because another one has the
            same source or covers its choices (see `kgen.tune.safe_claims`).
    """

    dtypes: Mapping[str, str]
    variant: Variant
    config: Config
    rendered: Rendered
    record: Record | None


@dataclass(frozen=True)
class PassResult:
    """The confirmed results of one pass: everything that the library and the report need.

    Attributes:
        request: The tune.
        pass_name: `forward` or `backward`.
        environment: Facts of the machine.
        copy_gbps: Measured copy bandwidth of the device.
        results: The results of the problems that are confirmed, in the order of the request.
        safe: The safe kernels that are certified.
        safe_missing: The dtypes of the safe kernels that are not certified yet.
        worker_restarts: Number of times that the worker process was replaced.
        seconds: Wall-clock seconds so far.
    """

    request: TuneRequest
    pass_name: str
    environment: Mapping[str, str]
    copy_gbps: float
    results: tuple[ProblemResult, ...]
    safe: tuple[SafeResult, ...]
    safe_missing: tuple[Mapping[str, str], ...]
    worker_restarts: int
    seconds: float = field(default=0.0)

    @property
    def is_whole(self) -> bool:
        """Whether every problem of the pass is confirmed, and every safe kernel certified."""
        is_confirmed = len(self.results) == len(self.request.problems[self.pass_name])
        return is_confirmed and not self.safe_missing
