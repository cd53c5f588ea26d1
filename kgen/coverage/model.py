"""The result of a coverage; the field names are the keys of its YAML. See docs/coverage.md."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.report import Environment, decode_as, encode_as, read_document, write_whole

SCHEMA = 1
NO_KERNEL = "none"  # the step of a problem that the library refuses


@dataclass(frozen=True, slots=True)
class CoveredProblem:
    """The kernel that the library runs for one problem, and its times.

    Attributes:
        pass_name: `forward` or `backward`; the key `pass`.
        problem: The problem.
        step: The dispatch step, or `none` if the library refuses the call.
        config: The config that serves the problem; empty if there is none.
        floor_us: Least possible time.
        kernel_us: Median time of the kernel, which is verified for this problem just before.
        inputs: The kind of inputs on which the kernel is slower. `kernel_us`, `call_us` and
            `peer_us` are each the time on the kind of inputs where that contender is slower. Empty
            if the kernel was timed on random inputs only.
        other_us: Median time of the kernel on the other inputs.
        call_us: Median time of a call of the library in the same run.
        peer: The fastest peer.
        peer_us: Median time of the peer in the same run.
        ratio: Time of the peer over the time of the kernel, median over rounds; above 1 the library
            is faster.
        first_ms: Host time of the first call of the problem; kernels that the cache holds are not
            compiled.
        best: The best config of a search of this problem; empty if the problem was not searched.
        best_us: Median time of the best config, in one run with the kernel.
        loss: Time of the kernel over the time of the best config, minus 1; 0 if they are the same.
        failed: Why there is no time: the first line about the fault of the kernel.
    """

    pass_name: str
    problem: str
    step: str
    config: str = ""
    floor_us: float | None = None
    kernel_us: float | None = None
    call_us: float | None = None
    peer: str = ""
    peer_us: float | None = None
    ratio: float | None = None
    first_ms: float | None = None
    best: str = ""
    best_us: float | None = None
    loss: float | None = None
    failed: str = ""
    inputs: str = ""
    other_us: float | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, tail and worst value of a figure over problems.

    Attributes:
        count: Number of problems.
        mean: Geometric mean of ratios; arithmetic mean of losses.
        tail: Tenth percentile of ratios; ninetieth of losses.
        worst: Smallest ratio; largest loss.
    """

    count: int
    mean: float
    tail: float
    worst: float


@dataclass(frozen=True, slots=True)
class CoverageReport:
    """Coverage of one operator on one GPU.

    Attributes:
        operator: Operator name.
        gpu: Profile name.
        populations: Sources of the problems: names of populations, or `--problem`.
        environment: The machine and versions of the measurement; None if nothing was timed.
        problems: Results in the order of the populations.
    """

    operator: str
    gpu: str
    populations: tuple[str, ...]
    environment: Environment | None
    problems: tuple[CoveredProblem, ...]
    schema: int = SCHEMA

    def steps(self, pass_name: str) -> Counter[str]:
        """Number of problems by dispatch step."""
        return Counter(p.step for p in self.problems if p.pass_name == pass_name)

    def ratios(self, pass_name: str) -> Spread | None:
        """Spread of the ratios to the fastest peer; None if no problem has one."""
        found = [p.ratio for p in self.problems if p.pass_name == pass_name and p.ratio is not None]
        if not found:
            return None
        return Spread(len(found), statistics.geometric_mean(found), _tenths(found)[0],
                      min(found))

    def losses(self, pass_name: str) -> Spread | None:
        """Spread of the losses against searches of the same problems; None without a search."""
        found = [p.loss for p in self.problems if p.pass_name == pass_name and p.loss is not None]
        if not found:
            return None
        return Spread(len(found), statistics.fmean(found), _tenths(found)[-1], max(found))


def _tenths(values: Sequence[float]) -> list[float]:
    """The nine values that cut the values into tenths, interpolated."""
    return statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [
        values[0]] * 9


def load_coverage(path: str | Path) -> CoverageReport:
    """Read a coverage that `write_coverage` wrote.

    Raises:
        RecordError: If there is no such file, or it deviates from the schema; the text names line
            and key.
    """
    text = read_document(path, "no such coverage; kgen coverage --yaml writes it")
    return decode_as(CoverageReport, text, str(path), SCHEMA, "run kgen coverage again")


def write_coverage(path: str | Path, report: CoverageReport) -> None:
    """Write a coverage as YAML.

    Raises:
        StorageError: If it cannot be written.
    """
    header = f"Coverage of {report.operator} on {report.gpu}, written by kgen."
    write_whole(path, encode_as(report, header, report.schema))
