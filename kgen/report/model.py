"""The content of a report. The field names are the keys of the YAML; docs/report-format.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.model.config import Config, Value
from kgen.model.record import COLD, OutputAccuracy, Timing

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the versions of a measurement.

    Attributes:
        device: Name that the driver reports; for the host the name of the CPU.
        driver: Version of the GPU driver; empty for the host.
        compiler: `nvrtc`, `nvcc`, `host`.
        compiler_version: Version of the compiler.
        torch: Version of torch.
        python: Version of Python.
        kgen: Version of kgen.
        commit: Git commit of kgen; empty outside a checkout.
        copy_gbps: Measured bandwidth of a device-to-device copy (read plus write), 1e9 bytes/s.
        sm_clock_mhz: SM clock during the measurements; None if unknown.
        memory_clock_mhz: Memory clock; None if unknown.
    """

    device: str
    driver: str
    compiler: str
    compiler_version: str
    torch: str
    python: str
    kgen: str
    commit: str
    copy_gbps: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None


@dataclass(frozen=True, slots=True)
class RuleCount:
    """A rule of the search space, and the number of configs that it was the first to refuse."""

    rule: str
    why: str
    where: str
    configs: int


@dataclass(frozen=True, slots=True)
class SpaceSummary:
    """The search space of one problem: numbers of all and feasible configs, refusals by rule."""

    size: int
    feasible: int
    refused: tuple[RuleCount, ...] = ()


@dataclass(frozen=True, slots=True)
class Trials:
    """The trials of one problem.

    Attributes:
        count: Number of trials, including those of earlier runs.
        fates: Number of trials by fate.
        reasons: Number of trials that were not verified, by the first line of the reason.
        search_seconds: Wall-clock time of the search.
        compile_seconds: Compiler time, summed over parallel compilations.
    """

    count: int
    fates: Mapping[str, int]
    reasons: Mapping[str, int]
    search_seconds: float
    compile_seconds: float


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel of the chosen config, in launch order.

    Attributes:
        name: Kernel name.
        threads: Threads per block.
        registers: Registers per thread; None on the host.
        spill_bytes: Stores plus loads of spilled registers, bytes per thread.
        smem_static_bytes: Static shared memory of a block.
        smem_dynamic_bytes: Dynamic shared memory of a block.
        occupancy: Resident threads over the SM's maximum, 0 to 1; None if unknown.
    """

    name: str
    threads: int
    registers: int | None
    spill_bytes: int | None
    smem_static_bytes: int | None
    smem_dynamic_bytes: int
    occupancy: float | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The winner of a problem.

    Attributes:
        record: Identity of the winner's record.
        source: Digest of the measured source; a row of a library may have a later source.
        remarks: Performance remarks of the compiler.
        code: Digest of the measured machine code, which identifies the row; empty in reports older
            than the field.
    """

    variant: str
    config: Mapping[str, Value]
    record: str
    source: str
    timing: Timing
    kernels: tuple[KernelReport, ...]
    remarks: tuple[str, ...] = ()
    code: str = ""

    @property
    def label(self) -> str:
        """`variant(a=1, b=2)`, for people."""
        return Config.of(self.variant, self.config).label


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """The second of the finalists; `ratio` is its time over the winner's."""

    variant: str
    config: Mapping[str, Value]
    record: str
    median_us: float
    ratio: float


@dataclass(frozen=True, slots=True)
class Peer:
    """A competitor timed in the same run: `eager`, `torch.compile`, ..."""

    name: str
    timing: Timing


@dataclass(frozen=True, slots=True)
class HostProof:
    """The winner's source, run on the CPU.

    Attributes:
        compiler: `host` or `host-asan` (AddressSanitizer), with its version.
        orders: Seeds of the orders in which the threads of a block ran; 0 is the order by rank.
            Every input set had one launch for each seed.
        inputs: Input sets, each `label @ seed`.
    """

    compiler: str
    orders: tuple[int, ...]
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """The proof of a winner; `kgen verify --record` with the winner's record repeats it.

    Attributes:
        seed: Seed of all inputs except the fresh ones.
        inputs: Input sets tried on the device, each `label @ seed`.
        skipped: Input sets that the variant's guards do not admit.
        launches: Number of launches on each input set; the initial content of outputs and
            workspaces differs between them.
        same_bits: Whether all launches on the same inputs gave the same bits. If not, the variant
            is declared nondeterministic, and each result was within the bound.
        host: Runs of the same source on the CPU.
        host_missing: Why host runs are missing.
    """

    seed: int
    inputs: tuple[str, ...]
    skipped: tuple[str, ...]
    launches: int
    same_bits: bool
    host: tuple[HostProof, ...]
    host_missing: str = ""


@dataclass(frozen=True, slots=True)
class ProblemReport:
    """The result of tuning one problem.

    Attributes:
        pass_name: `forward` or `backward`; the key `pass`.
        problem: `M=8192,N=4096,dtype=bf16,w_dtype=bf16`.
        environment: Key into the report's environments.
        space: The search space.
        trials: The trials.
        chosen: The winner.
        floor_us: Least possible time: bytes over measured copy bandwidth, or flops over peak.
        floor_share: floor_us over the winner's median.
        peers: Competitors timed in the same run.
        accuracy: Error of each output against float64; bound = 2 loss + the dtype's floor.
        runner_up: The second of the finalists; None if no other config was verified.
        evidence: The proof of the winner; None in reports older than the field.
        l2: The requested state of L2, `cold` or `warm`; the protocol's line has the actual state.
        slowed: Why the clocks were reduced while the finalists were timed; empty if they were not.
    """

    pass_name: str
    problem: str
    environment: str
    space: SpaceSummary
    trials: Trials
    chosen: Chosen
    floor_us: float
    floor_share: float
    peers: tuple[Peer, ...]
    accuracy: tuple[OutputAccuracy, ...]
    runner_up: RunnerUp | None = None
    evidence: Proof | None = None
    l2: str = COLD
    slowed: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All problems of one operator tuned on one GPU.

    Attributes:
        operator: Operator name.
        gpu: Profile name.
        environments: Environments by the short identity that records have as `environment`.
        problems: Entries in the order of pass and problem.
    """

    operator: str
    gpu: str
    environments: Mapping[str, Environment]
    problems: tuple[ProblemReport, ...]
    schema: int = SCHEMA
