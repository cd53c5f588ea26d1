"""Records of trials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kgen.model.config import Config
from kgen.model.digest import digest_of

COLD, WARM = "cold", "warm"
"""The content of L2 when a kernel is timed: none of its inputs, or all that fit."""

RANDOM, TRAINED = "random", "trained"
"""The inputs that a kernel is timed on: the case `normal`, and those of a trained model."""


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
    """Device time on other inputs than those that count: it is not longer.

    Attributes:
        inputs: Their name.
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
    """Device time of one execution of a plan: of several inputs, on those where it is slowest.

    Attributes:
        median_us: Median of the samples, microseconds.
        low_us: First quartile.
        high_us: Third quartile.
        samples: Number of samples.
        protocol: How it was measured, one line:
            `graph of 64, 97 buffer sets, cold L2, median +-0.4 %`.
        inputs: The inputs that it was measured on.
        others: Times on other inputs; empty if there are none, or if they were not timed.
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
        """Medians by the name of the inputs, the random ones first."""
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
    """One input set that a kernel was tried on, with the seed that reproduces it."""

    case: str
    seed: int


@dataclass(frozen=True, slots=True)
class HostRun:
    """The same rendered source, run on the CPU.

    Attributes:
        compiler: `host` or `host-asan`, with its version.
        orders: Seeds of the orders in which the threads of a block ran, one launch each on every
            input set; 0: by rank.
        tried: Input sets.
        key: Digest of the source without comments, and of the compiler with its flags: what was
            run. Empty in records that are older than the field.
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
        skipped: Input sets that the variant's guards do not admit; of a run on the host also those
            that are too large for it, and what shorter ones stand for.
        launches: On the values of each input set; outputs and workspaces are filled before each
            in turn, see `kgen.check.steps`.
        bitwise: Whether all launches had to give the same bits.
        host: Runs of the same source on the CPU; empty unless it is a certificate.
        host_missing: Why there are none.
        rules: Digest of how kgen proves (`kgen.trial.proof_rules`); empty in records that are
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
            and problem, and of `warm` for a trial that was timed so. Empty if it was not built,
            and in records that are older than the digest of code.
        operator: Operator name.
        pass_name: `forward` or `backward`.
        problem: `str(Problem)`.
        gpu: Profile name.
        config: The config.
        fate: The outcome.
        reason: Empty if verified, else one paragraph.
        text_key: Like `key`, of the rendered text in the place of the code. The shortcut: who has
            the same text need not build to know that the code is the same.
        source: Digest of the rendered source with everything that it includes.
        code: Digest of the machine code (`kgen.runtime.code_digest`); of a build for the host, of
            the text without comments. Empty where `key` is.
        definition: Digest of the operator's definition and inputs (`kgen.trial.definition`); empty
            in records that are older than the field.
        guards: Digest of the calls that its variant admits; likewise.
        trained: Digest of how the trained inputs of its time are drawn (`trained_digest`); empty if
            it was timed on random inputs alone.
        environment: Digest of the environment (see the report).
        resources: Per kernel, in launch order; empty if it was not built.
        timing: The timing of a verified trial.
        accuracy: Per output, of a verified or wrong trial.
        evidence: The evidence of a certificate; None of a trial of the search.
        when: UTC, ISO 8601.
        id: Short identity of this very record, for `--record`. Given once: it stays when the
            variant or a parameter is renamed, or when the record is found valid for a new text.
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
