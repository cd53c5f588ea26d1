"""Measured configs of each problem with their times, read from the committed journals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kgen.catalogue import Entry, profile_named
from kgen.emit import PACKAGE
from kgen.errors import GpuError, KgenError
from kgen.journal import Journal
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Record, Resources
from kgen.report.searches import searches_of
from kgen.search.declared import as_declared

_WARM = "warm L2"  # part of the text of a timing's protocol


@dataclass(frozen=True)
class Observation:
    """A config that a search verified and timed.

    Attributes:
        config: The config.
        resources: The compiler's report, by kernel.
        median_us: The time in the search's trial. Finals time some configs again, next to peers;
            those times are not used, because they would mix two protocols.
    """

    config: Config
    resources: tuple[tuple[str, Resources], ...]
    median_us: float


@dataclass(frozen=True)
class Searched:
    """The configs of one problem of one pass that a search timed on one GPU.

    Attributes:
        operator: The operator.
        pass_name: `forward` or `backward`.
        gpu: The GPU on which they were timed.
        problem: The problem.
        observations: One for each config, in the order of their first trial.
    """

    operator: str
    pass_name: str
    gpu: GpuProfile
    problem: Problem
    observations: tuple[Observation, ...]

    @property
    def best_us(self) -> float:
        """The shortest time."""
        return min(o.median_us for o in self.observations)


def read_searches(entry: Entry, library: Path) -> list[Searched]:
    """Read every journal of an operator in a library.

    Journals of the CPU are left out, as are times with a warm L2, and records of problems and
    variants that the operator no longer has.

    Args:
        entry: The operator with its space.
        library: Folder that holds `kgen_ops`; it need not exist.
    Raises:
        StorageError, RecordError: If a journal cannot be read.
    """
    found: list[Searched] = []
    reports = library / PACKAGE / entry.operator.name / "reports"
    for path in sorted(reports.glob("*.trials.jsonl")):
        try:
            gpu = profile_named(path.name.removesuffix(".trials.jsonl"))
        except GpuError:
            continue  # this installation does not have the GPU's profile
        if not gpu.is_host:
            found += _searched(entry, gpu, Journal(path).read())
    return found


def _searched(
    entry: Entry, gpu: GpuProfile, records: Iterable[Record]
) -> Iterator[Searched]:
    for (pass_name, text), search in searches_of(records).items():
        try:
            problem = parse_problem(text, entry.operator.signature)
        except KgenError:
            continue
        # A later trial of a config replaces an earlier one, as the code may have changed.
        newest: dict[Config, Observation] = {}
        for record in search.timed:
            config = as_declared(entry, pass_name, record.config)
            if config is None or record.timing is None or _WARM in record.timing.protocol:
                continue
            newest[config] = Observation(config, record.resources, record.timing.median_us)
        if newest:
            yield Searched(
                entry.operator.name, pass_name, gpu, problem, tuple(newest.values())
            )
