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
        memory_bytes: Device memory that trials may use; None for all of it. On the host, the limit
            on the worker process.
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
        variant: The config's variant, from which the launches are computed for each input set.
        config: The config.
        artifact: The built module.
    """

    variant: Variant
    config: Config
    artifact: Artifact


@dataclass(frozen=True, slots=True)
class Probe:
    """Request for the facts of the machine: device, driver, torch, measured copy bandwidth."""


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
    """Request to verify one candidate, then time it.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        candidate: The candidate to run.
        give_up_above_us: Stop timing early if the kernel takes longer than this; None: never.
        level: Which inputs to verify with: the few sets of a trial, all of a certificate, or
            the small ones of a host run.
        measure: Whether to time the candidate at all.
        orders: On the host, seeds of the orders in which a CTA's threads run, one launch per order;
            0: by rank. Empty: by rank, and the level's number of launches.
        seeds: (seed of the fixture, seed of the fresh inputs), to repeat an earlier verification;
            None: the worker's own.
        trained_below_us: Time the candidate on trained inputs, too, unless it takes longer than
            this on random ones; None: always.
        part: Which input sets to run; None: all. The parts of a run must have the same `seeds`.
        threads: On the host, OS threads that share the CTAs of a launch; 0: the device's default,
            which is the number of cores.
        comparisons: On the host, file for the comparisons of a sanitized build; empty: none.
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
    comparisons: str = ""


@dataclass(frozen=True, slots=True)
class SetBegun:
    """Progress message of a trial with a `part`: the index in the run of the set that begins."""

    place: int


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial.

    Attributes:
        fate: `VERIFIED`, `WRONG`, `CRASHED`, `TIMED_OUT` or `REJECTED`.
        reason: Empty if verified.
        timing: The time, if the candidate was verified and measured.
        accuracy: The accuracy of each output.
        evidence: The sets, seeds and launches of the verification; None for a search's trial.
        trained: Digest of the trained inputs, as in the record.
        sets: The result of each set, if the trial had a `part`.
        printed: Bytes that the kernel printed, if the trial had a `part`.
        printed_head: The first of these bytes.
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
    """Request for the names of the peers that the operator offers for a pass on this machine."""

    pass_name: str


@dataclass(frozen=True, slots=True)
class PeerNamesOutcome:
    """Names of peers, in the operator's order."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Finals:
    """Request to time the best candidates and the peers against each other, interleaved.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        candidates: The verified candidates to time; one may occur several times.
        peers: Names of the peers to time; None: all available ones.
        library: Folder of an emitted library whose public function is timed too; empty: none.
            A worker can import only one library.
        compare_peers: Whether to compare the peers' outputs with the oracle before timing.
        check_outputs: Whether to compare the candidates' outputs with the oracle after timing.
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
    """Times of one interleaved run; for each contender, the time on its slower inputs.

    Attributes:
        timings: The timing of each candidate, in their order.
        samples_us: The samples of each candidate's timing; paired by round.
        peers: Timings of the peers that ran, by name.
        peer_samples_us: The samples of the peers' timings; paired by round with `samples_us`.
        peer_errors: Why a peer did not run, by name.
        peer_accuracy: If requested, the error of each output of the peers that ran, on the
            problem's own inputs.
        clocks: Clock and throttle state around the run, as texts; empty where it cannot be read.
            `slowed` says why the times are suspect, and is absent otherwise.
        faults: If requested, the fault in each candidate's outputs after it was timed; empty texts
            for right outputs.
        library: Timing of the library's function, if a library was named.
        library_us: The samples of that timing.
        occupancy: Occupancy of each candidate's first kernel, resident threads over the most that
            an SM can hold; None on the host.
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
    """Request to trace one candidate and the peers, one after the other, under torch.profiler.

    Attributes:
        finals: What to run: one candidate, the peers (None: all, including the slow ones), and the
            library if its function is to be traced too.
        path: The file for the trace.
    """

    finals: Finals
    path: str


@dataclass(frozen=True, slots=True)
class TraceOutcome:
    """The summary of a trace.

    Attributes:
        traced: The candidate first, then the library's function, then the peers that ran.
        peer_errors: Why a peer did not run, by name.
    """

    traced: tuple[Traced, ...]
    peer_errors: dict[str, str]


@dataclass(frozen=True, slots=True)
class CallCosts:
    """Request to measure the host time of calls of the library's function and of the peers.

    Gradients are off.

    Attributes:
        pass_name: `forward` or `backward`.
        problem: The problem.
        peers: Names of the peers to time; None: all except the slow ones.
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
        costs: The host time of the library's function, then those of the peers that ran.
        launcher: The library's launcher: `compiled`, `Python`, or `host` on a CPU.
        first_ms: Host time of the library's first call, which reads the table, checks the kernel
            and loads it; without a shipped cubin it also compiles it, or finds it in the cache.
        peer_errors: Why a peer did not run, by name.
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
        operator: Whether the operator's own module is at fault, so that every config would fail.
        refused: Whether a launch asked for more than the device has, and nothing ran.
    """

    message: str
    fatal: bool
    operator: bool = False
    refused: bool = False


Request = Probe | PeerNames | Trial | Finals | Trace | CallCosts
