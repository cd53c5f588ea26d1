"""The results of a bench. The field names are the keys of its YAML; docs/bench.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.model.call_cost import CallCost
from kgen.model.config import Config, Value
from kgen.model.record import OutputAccuracy, Timing
from kgen.model.traced import Traced


@dataclass(frozen=True, slots=True)
class ChosenConfig:
    """The config of kgen that is timed for a problem.

    Attributes:
        config: The config.
        origin: `tuned`: the winner in the report of this GPU; `safe`: the safe variant.
        remark: For `safe`: why there is no tuned config, and how to tune the problem; else empty.
    """

    config: Config
    origin: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """A kernel of kgen, verified and then timed.

    Attributes:
        variant: The kernel's variant.
        config: The kernel's parameters.
        timing: The kernel's time in the interleaved run.
        floor_share: Least possible time over the kernel's median.
        accuracy: Error of each output against float64, from the verification just before.
    """

    variant: str
    config: Mapping[str, Value]
    timing: Timing
    floor_share: float
    accuracy: tuple[OutputAccuracy, ...]

    @property
    def label(self) -> str:
        """`variant(a=1, b=2)`."""
        return Config.of(self.variant, self.config).label


@dataclass(frozen=True, slots=True)
class PeerTime:
    """A peer in the same run.

    Attributes:
        name: The operator's name for the peer.
        timing: The peer's time in the interleaved run.
        floor_share: Least possible time over the peer's median.
        ratio: The peer's time over the time of kgen's kernel, median over rounds.
        ratio_low: Lower end of that median's 95 % interval; None if the rounds are too few for an
            interval.
        ratio_high: Upper end of the interval; None if the rounds are too few.
        accuracy: Error of each of the peer's outputs against float64, on the problem's own inputs.
    """

    name: str
    timing: Timing
    floor_share: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    accuracy: tuple[OutputAccuracy, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """kgen's kernel and its peers on one problem.

    Attributes:
        pass_name: `forward` or `backward`; the key `pass`.
        problem: `M=8192,N=4096,dtype=bf16,w_dtype=bf16`.
        origin: `tuned` or `safe`; see `ChosenConfig`.
        remark: See `ChosenConfig`.
        floor_us: Least possible time: bytes over measured copy bandwidth, or flops over peak.
        kernel: kgen's kernel.
        peers: The peers that ran, in the operator's order.
        failed: Peers that did not run, by name, with the reason.
        clocks: Clock and throttle state right after the run; empty if the state cannot be read.
    """

    pass_name: str
    problem: str
    origin: str
    remark: str
    floor_us: float
    kernel: TimedKernel
    peers: tuple[PeerTime, ...]
    failed: Mapping[str, str]
    clocks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class LadderStepResult:
    """One step of a published ladder on one problem.

    Attributes:
        step: The published name of the step.
        variant: The variant that reproduces the step.
        config: The variant's parameters.
        published: The published figure with its GPU; empty if there is none.
        note: How the kernel differs from the published kernel.
        refused: Why the step cannot run for this problem (rule, reason, place); empty if it ran.
        timing: Time in the interleaved run of all steps; None if refused.
        floor_share: Least possible time over the step's median; None if refused.
        speed_up: Time of step 1 over the time of this step, median over rounds; None if either step
            was refused.
        accuracy: Error of each output against float64; empty if refused.
    """

    step: str
    variant: str
    config: Mapping[str, Value]
    published: str
    note: str
    refused: str = ""
    timing: Timing | None = None
    floor_share: float | None = None
    speed_up: float | None = None
    accuracy: tuple[OutputAccuracy, ...] = ()

    @property
    def label(self) -> str:
        """`variant(a=1, b=2)`."""
        return Config.of(self.variant, self.config).label


@dataclass(frozen=True, slots=True)
class LadderResult:
    """A published ladder, reproduced on one problem.

    Attributes:
        pass_name: `forward` or `backward`; the key `pass`.
        problem: The problem.
        floor_us: Least possible time.
        rungs: The steps, in published order.
        clocks: As in `PeerComparison`; empty if every step was refused.
    """

    pass_name: str
    problem: str
    floor_us: float
    rungs: tuple[LadderStepResult, ...]
    clocks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Profile:
    """Profiles of kgen's kernel and its peers on one problem.

    Attributes:
        pass_name: `forward` or `backward`; the key `pass`.
        problem: The problem.
        origin: `tuned` or `safe`; see `ChosenConfig`.
        remark: See `ChosenConfig`.
        variant: Variant of kgen's kernel.
        config: The variant's parameters.
        on_gpu: Whether kernels of a GPU were traced; otherwise PyTorch operators on a CPU.
        contenders: `kgen`: kgen's kernel as it is timed; `kgen_ops`: the library's function, if the
            library was emitted; then the peers that ran.
        failed: Peers that did not run, by name, with the reason.
        trace: File of the trace.
    """

    pass_name: str
    problem: str
    origin: str
    remark: str
    variant: str
    config: Mapping[str, Value]
    on_gpu: bool
    contenders: tuple[Traced, ...]
    failed: Mapping[str, str]
    trace: str

    @property
    def label(self) -> str:
        """`variant(a=1, b=2)`."""
        return Config.of(self.variant, self.config).label


@dataclass(frozen=True, slots=True)
class CallTable:
    """Host costs of calls of one problem, without gradients.

    Attributes:
        pass_name: `forward` or `backward`; the key `pass`.
        problem: The problem.
        launcher: The launcher of the library: `compiled`, `Python`, or `host` on a CPU.
        first_ms: Host time of the library's first call of the problem; see docs/bench.md.
        costs: `kgen_ops`: the library's function; then the peers that ran.
        failed: Peers that did not run, by name, with the reason.
    """

    pass_name: str
    problem: str
    launcher: str
    first_ms: float
    costs: tuple[CallCost, ...]
    failed: Mapping[str, str]
