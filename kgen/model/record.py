"""Records of trials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kgen.model.config import Config
from kgen.model.digest import digest_of

COLD, WARM = "cold", "warm"
"""What L2 holds when a kernel is timed: none of the kernel's inputs, or all that fit."""

RANDOM, TRAINED = "random", "trained"
"""The inputs that a kernel is timed on: the case `normal`, and inputs of a trained model."""


class Fate(StrEnum):
    """The outcome of a trial."""

    REJECTED = "rejected"  # built, but refused because of its resources
    BUILD_FAILED = "build_failed"
    WRONG = "wrong"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"
    VERIFIED = "verified"


@dataclass(frozen=True, slots=True)
class Resources:
    """The compiler's resource report of one kernel.

    Attributes:
        registers: Per thread.
        spill_bytes: Stores plus loads of spilled registers, bytes per thread.
        stack_bytes: Local-memory frame, bytes per thread.
        smem_bytes: Static shared memory, bytes per block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int


@dataclass(frozen=True, slots=True)
class OtherTime:
    """Device time on inputs other than those that count; the kernel is not slower on them.

    Attributes:
        inputs: Name of the inputs.
        median_us: Median of the samples, microseconds.
        low_us: First quartile.
        high_us: Third quartile.
    """

    inputs: str
    median_us: float
    low_us: float
    high_us: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Device time of one execution of a plan, on the kind of inputs where it is slowest.

    Attributes:
        median_us: Median of the samples, microseconds.
        low_us: First quartile.
        high_us: Third quartile.
        samples: Number of samples.
        protocol: How the time was measured, one line:
            `graph of 64, 97 buffer sets, cold L2, median +-0.4 %`.
        inputs: The kind of inputs that the time was measured on.
        others: Times on other kinds of inputs; empty if there are none, or if they were not timed.
    """

    median_us: float
    low_us: float
    high_us: float
    samples: int
    protocol: str
    inputs: str = RANDOM
    others: tuple[OtherTime, ...] = ()

    @property
    def by_inputs_us(self) -> dict[str, float]:
        """Medians by the name of the inputs, the random inputs first."""
        found = {self.inputs: self.median_us} | {o.inputs: o.median_us for o in self.others}
        return dict(sorted(found.items(), key=lambda item: item[0] != RANDOM))


@dataclass(frozen=True, slots=True)
class OutputAccuracy:
    """Error of one output against the float64 oracle, worst over all inputs tried.

    Attributes:
        output: Tensor name.
        error: Largest |y - y64| / scale.
        bound: The limit of `error`: 2 `loss` plus the floor of the dtype.
        eager_error: The same quantity for eager PyTorch in the problem's dtypes.
        loss: The error of the definition itself in the problem's dtypes; None in records older
            than the field.
    """

    output: str
    error: float
    bound: float
    eager_error: float
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Tried:
    """One input set that a kernel was tried on, with the seed that reproduces the set."""

    case: str
    seed: int


@dataclass(frozen=True, slots=True)
class HostRun:
    """The same rendered source, run on the CPU.

    Attributes:
        compiler: `host` or `host-asan`, with its version.
        orders: Seeds of the orders in which the threads of a block ran; 0 is the order by rank.
            Every input set had one launch for each seed.
        tried: Input sets that were tried.
        key: Identity of the executable: digest of the source without comments, and of the compiler
            with its flags. Empty in records that are older than the field.
    """

    compiler: str
    orders: tuple[int, ...]
    tried: tuple[Tried, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The proof of a verified record, with the data to repeat it.

    Attributes:
        seed: The seed of the fixture; it determines all input sets except the fresh ones.
        tried: Input sets on the device.
        skipped: Input sets that the variant's guards do not admit. For a run on the host also the
            sets that are too large for it, and the full-size sets that shortened sets stand for.
        launches: Number of launches on each input set. Outputs and workspaces are filled before
            each launch; see `kgen.check.steps`.
        bitwise: Whether all launches had to give the same bits.
        host: Runs of the same source on the CPU; empty unless the record is a certificate.
        host_missing: Why there are no host runs.
        rules: Digest of the verifier's code (`kgen.trial.proof_rules`); empty in records that are
            older than the field.
    """

    seed: int
    tried: tuple[Tried, ...]
    skipped: tuple[str, ...]
    launches: int
    bitwise: bool
    host: tuple[HostRun, ...] = ()
    host_missing: str = ""
    rules: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """The written-down outcome of a trial.

    Attributes:
        key: Identity of what was tried: digest of the machine code, compiler, flags, arch, plan
            and problem; also of `warm` for a trial that was timed with warm L2. Empty if the kernel
            was not built, and in records that are older than the digest of code.
        operator: Operator name.
        pass_name: `forward` or `backward`.
        problem: `str(Problem)`.
        gpu: Profile name.
        config: The config.
        fate: The outcome.
        reason: Empty if verified, else one paragraph.
        text_key: Like `key`, with the rendered text in place of the machine code. Equal texts give
            equal code, so a kernel with a known `text_key` need not be built to find its record.
        source: Digest of the rendered source with everything that it includes.
        code: Digest of the machine code (`kgen.runtime.code_digest`); for a build for the host,
            digest of the text without comments. Empty where `key` is empty.
        definition: Digest of the operator's definition and inputs (`kgen.trial.definition`); empty
            in records that are older than the field.
        guards: Digest of the calls that the variant admits; empty in records that are older than
            the field.
        trained: Digest of how the trained inputs of the timing are drawn (`trained_digest`); empty
            if the kernel was timed on random inputs alone.
        environment: Digest of the environment (see the report).
        resources: Per kernel, in launch order; empty if the kernel was not built.
        timing: The timing of a verified trial.
        accuracy: Error of each output, for a verified or wrong trial.
        evidence: The evidence of a certificate; None for a trial of the search.
        when: UTC, ISO 8601.
        id: Short identity of this record, for `--record`. It never changes, even if the variant or
            a parameter is renamed, or the record is found valid for a new text.
    """

    key: str
    operator: str
    pass_name: str
    problem: str
    gpu: str
    config: Config
    fate: Fate
    reason: str = ""
    text_key: str = ""
    source: str = ""
    code: str = ""
    environment: str = ""
    resources: tuple[tuple[str, Resources], ...] = ()
    timing: Timing | None = None
    accuracy: tuple[OutputAccuracy, ...] = ()
    evidence: Evidence | None = None
    when: str = ""
    id: str = ""
    definition: str = ""
    guards: str = ""
    trained: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            given = digest_of([self.text_key or self.key, self.config.digest, self.when])[:8]
            object.__setattr__(self, "id", given)
