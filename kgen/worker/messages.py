"""What a tuner and its worker say to each other. Plain frozen values; pickled over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from kgen.model.artifact import Artifact
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import COLD, Fate, OutputAccuracy, Timing
from kgen.model.space import Variant


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to know before its first trial.

    Attributes:
        operator: Operator name; the worker finds the module itself.
        paths: The `--path` folders.
        gpu: Profile of the device.
        ordinal: CUDA device ordinal (ignored on the host).
        seed: Of the random inputs.
        l2: `cold` or `warm`: whether buffer sets rotate while a kernel is timed.
    """

    operator: str
    paths: tuple[str, ...]
    gpu: GpuProfile
    ordinal: int
    seed: int
    l2: str = COLD


@dataclass(frozen=True, slots=True)
class Candidate:
    """A built config, ready to run.

    Attributes:
        variant: Its variant: launches are evaluated anew for every extent that is verified.
        config: The config.
        artifact: The built module.
    """

    variant: Variant
    config: Config
    artifact: Artifact


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks for the facts of the machine: device, driver, torch, measured copy bandwidth."""


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """Facts of the machine.

    Attributes:
        facts: Texts such as driver and torch version.
        copy_gbps: Measured device copy bandwidth, 1e9 bytes (read + written) per second.
    """

    facts: dict[str, str]
    copy_gbps: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Verify one candidate, then time it.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        candidate: What to run.
        give_up_above_us: Stop timing early beyond this; None: never.
        certify: Verify with the full set of inputs instead of the quick one.
        measure: Whether to time it at all.
    """

    pass_name: str
    problem: Problem
    candidate: Candidate
    give_up_above_us: float | None = None
    certify: bool = False
    measure: bool = True


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial ended.

    Attributes:
        fate: `VERIFIED`, `WRONG`, `CRASHED`, `TIMED_OUT` or `REJECTED`.
        reason: Empty if verified.
        timing: If verified and measured.
        accuracy: Per output.
        occupancy: Resident threads over the most an SM can hold, of the first kernel; None on
            the host.
        cases: Input cases that were tried.
    """

    fate: Fate
    reason: str = ""
    timing: Timing | None = None
    accuracy: tuple[OutputAccuracy, ...] = ()
    occupancy: float | None = None
    cases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finals:
    """Time the best candidates and the peers against each other, interleaved.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        candidates: What to time; the same one may be entered several times.
        peers: Whether to time the operator's peers too.
        library: Folder of an emitted library whose public function is timed too; empty: none.
            A worker can import one library only.
    """

    pass_name: str
    problem: Problem
    candidates: tuple[Candidate, ...]
    peers: bool
    library: str = ""


@dataclass(frozen=True, slots=True)
class FinalsOutcome:
    """Times of one interleaved run.

    Attributes:
        timings: One per candidate, in their order.
        samples_us: Per candidate, the samples behind its timing; paired by round.
        peers: Times of the peers that ran.
        peer_errors: Why a peer did not run.
        clocks: Clock and throttle state around the run, texts; empty where it cannot be read.
            `slowed` says why the times are suspect, and is absent otherwise.
        library: Time of the library's function, if one was named.
        library_us: The samples behind it.
    """

    timings: tuple[Timing, ...]
    samples_us: tuple[tuple[float, ...], ...]
    peers: dict[str, Timing] = field(default_factory=dict)
    peer_errors: dict[str, str] = field(default_factory=dict)
    clocks: dict[str, str] = field(default_factory=dict)
    library: Timing | None = None
    library_us: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that the worker caught.

    Attributes:
        message: What happened.
        fatal: Whether the device context is no longer usable, so that the worker ends.
        operator: Whether the operator's own module is at fault: no config can help then.
    """

    message: str
    fatal: bool
    operator: bool = False


Request = Probe | Trial | Finals
