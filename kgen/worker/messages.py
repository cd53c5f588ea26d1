"""The messages between a tuner and its worker: frozen values, pickled over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kgen.model.artifact import Artifact
from kgen.model.call_cost import CallCost
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.record import COLD, Evidence, Fate, OutputAccuracy, Timing
from kgen.model.set_results import Part, SetResults
from kgen.model.space import Variant
from kgen.model.traced import Traced

Level = Literal["trial", "certify", "host"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a worker before its first trial.

    Attributes:
        operator: Operator name; the worker finds the module itself.
        paths: The `--path` folders.
        gpu: Profile of the GPU that kernels are meant for.
        ordinal: CUDA device ordinal (ignored on the host).
        seed: The seed of the random inputs.
        l2: `cold` or `warm`: whether buffer sets rotate while a kernel is timed.
        on_host: Run on the host layer, whatever GPU the kernels are meant for.
        memory_bytes: Device memory that trials may use; None for all of it. On the host, of the
            worker process.
    """

    operator: str
    paths: tuple[str, ...]
    gpu: GpuProfile
    ordinal: int
    seed: int
    l2: str = COLD
    on_host: bool = False
    memory_bytes: int | None = None


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
        candidate: The candidate to run.
        give_up_above_us: Stop timing early beyond this; None: never.
        level: Which inputs to verify with: the quick set of a trial, all of a certificate, or
            the small ones of a host run.
        measure: Whether to time it at all.
        orders: On the host, seeds of the orders in which a block's threads run, one launch each;
            0: by rank. None: by rank, and as many launches as the level asks for.
        seeds: (fixture's, of the fresh inputs), to check an earlier verdict again; None: the
            worker's own.
        trained_below_us: Time it on the inputs of a trained model, too, unless random inputs take
            longer than this; None: whatever they take.
        part: Which input sets to try; None: all. The parts of a run must have the same `seeds`.
        threads: On the host, OS threads that share the blocks of a launch; 0: the device's own
            number, which is that of the cores.
    """

    pass_name: str
    problem: Problem
    candidate: Candidate
    give_up_above_us: float | None = None
    level: Level = "trial"
    measure: bool = True
    orders: tuple[int, ...] = ()
    seeds: tuple[int, int] | None = None
    trained_below_us: float | None = None
    part: Part | None = None
    threads: int = 0


@dataclass(frozen=True, slots=True)
class SetBegun:
    """Says, before the answer to a trial of a part, which set it is at: its place in the run."""

    place: int


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial.

    Attributes:
        fate: `VERIFIED`, `WRONG`, `CRASHED`, `TIMED_OUT` or `REJECTED`.
        reason: Empty if verified.
        timing: If verified and measured.
        accuracy: Per output.
        evidence: What was tried, and how; None of a search's trial, whose reason says it.
        trained: As in the record.
        sets: Of a part, the result of each of its sets.
        printed: Of a part, bytes that the kernel printed.
        printed_head: The beginning of that.
    """

    fate: Fate
    reason: str = ""
    timing: Timing | None = None
    accuracy: tuple[OutputAccuracy, ...] = ()
    evidence: Evidence | None = None
    trained: str = ""
    sets: SetResults | None = None
    printed: int = 0
    printed_head: bytes = b""


@dataclass(frozen=True, slots=True)
class PeerNames:
    """Asks for the names of the peers that the operator offers for a pass on this machine."""

    pass_name: str


@dataclass(frozen=True, slots=True)
class PeerNamesOutcome:
    """Names of peers, in the operator's order."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finals:
    """Time the best candidates and the peers against each other, interleaved.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        candidates: What to time, verified; the same one may be entered several times.
        peers: Names of the peers to time; None: all that there are.
        library: Folder of an emitted library whose public function is timed too; empty: none.
            A worker can import one library only.
        compare_peers: Whether to compare the peers' outputs with the oracle's, before.
        check_outputs: Whether to compare the candidates' outputs with the oracle's, after.
    """

    pass_name: str
    problem: Problem
    candidates: tuple[Candidate, ...]
    peers: tuple[str, ...] | None
    library: str = ""
    compare_peers: bool = False
    check_outputs: bool = False


@dataclass(frozen=True, slots=True)
class FinalsOutcome:
    """Times of one interleaved run. Of several inputs, the slower time counts, for each contender.

    Attributes:
        timings: One per candidate, in their order.
        samples_us: Per candidate, the samples behind its timing; paired by round.
        peers: Times of the peers that ran.
        peer_samples_us: Likewise, the samples behind them; paired by round with `samples_us`.
        peer_errors: Why a peer did not run.
        peer_accuracy: If asked for, the error of each output of the peers that ran, on the
            problem's own inputs.
        clocks: Clock and throttle state around the run, texts; empty where it cannot be read.
            `slowed` says why the times are suspect, and is absent otherwise.
        faults: If asked for, per candidate what was wrong with its outputs after it was timed;
            empty texts if nothing was.
        library: Time of the library's function, if one was named.
        library_us: The samples behind it.
        occupancy: Per candidate, resident threads over the most an SM can hold, of the first
            kernel; None on the host.
    """

    timings: tuple[Timing, ...]
    samples_us: tuple[tuple[float, ...], ...]
    peers: dict[str, Timing] = field(default_factory=dict)
    peer_samples_us: dict[str, tuple[float, ...]] = field(default_factory=dict)
    peer_errors: dict[str, str] = field(default_factory=dict)
    peer_accuracy: dict[str, tuple[OutputAccuracy, ...]] = field(default_factory=dict)
    clocks: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    library: Timing | None = None
    library_us: tuple[float, ...] = ()
    occupancy: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Trace one candidate and the peers, one after the other, under torch.profiler.

    Attributes:
        finals: What to run: the one candidate, the peers (None: also those that are timed on
            request only), the library if its function is to be traced too.
        path: The file for the trace.
    """

    finals: Finals
    path: str


@dataclass(frozen=True, slots=True)
class TraceOutcome:
    """The summary of a trace.

    Attributes:
        traced: Ours first, then the library's function, then the peers that ran.
        peer_errors: Why a peer did not run.
    """

    traced: tuple[Traced, ...]
    peer_errors: dict[str, str]


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Time what calls of the library's function and of the peers cost the host, without gradients.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        peers: Names of the peers to time; None: all that there are, but for the slow ones.
        library: Folder of an emitted library.
    """

    pass_name: str
    problem: Problem
    peers: tuple[str, ...] | None
    library: str


@dataclass(frozen=True, slots=True)
class CallCostsOutcome:
    """The host time of calls.

    Attributes:
        costs: The library's first, then those of the peers that ran.
        launcher: What the library launches with: `compiled`, `Python`, or `host` on a CPU.
        first_ms: Host time of the library's first call, which reads its table, checks and loads
            the kernel; without a shipped cubin it compiles it, too, or finds it in the cache.
        peer_errors: Why a peer did not run.
    """

    costs: tuple[CallCost, ...]
    launcher: str
    first_ms: float
    peer_errors: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that the worker caught.

    Attributes:
        message: The error.
        fatal: Whether the device context is no longer usable, so that the worker ends.
        operator: Whether the operator's own module is at fault: no config can help then.
        refused: Whether a launch asked for more than the device has, and nothing ran.
    """

    message: str
    fatal: bool
    operator: bool = False
    refused: bool = False


Request = Probe | PeerNames | Trial | Finals | Trace | CallCosts
