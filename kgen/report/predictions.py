"""Predicted rows of an operator on a GPU, `reports/predicted/<gpu>.yaml`; docs/report-format.md.

A prediction is no measurement. It has a file and types of its own, so that no reader of measured
reports can take a predicted time for a measured one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.model.config import Config, Value
from kgen.report.codec import decode_as, encode_as
from kgen.report.model import HostProof, KernelReport
from kgen.report.storage import load_report, read_document, write_whole

SCHEMA = 1
FOLDER = "predicted"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The model of a pass. `kgen predict --judge` says how good the model's choices are.

    Attributes:
        name: `mixed`, `trees`, ...
        gpus: The GPUs whose measured times the model was fitted to.
        problems: Number of searched problems with these times.
    """

    name: str
    gpus: tuple[str, ...]
    problems: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted row.

    Attributes:
        pass_name: `forward` or `backward`; YAML names it `pass`.
        problem: The problem.
        variant: The variant of the config.
        config: Parameters of the variant.
        record: Identity of the config's record.
        source: Digest of the rendered source.
        code: Digest of the machine code.
        compiler: The compiler that made the code, with its version.
        predicted_us: The model's estimate, which was never measured.
        floor_us: Least possible time, from bytes, operations, and the rates of the profile.
        feasible: Number of configs that the rules allow.
        compiled: Number of configs that were compiled.
        refused: Compiled configs that may not run, or that are wrong in a host run: label, and the
            first line of the reason.
        kernels: The kernels; their occupancy is computed, not read from a driver.
        host: Runs on the CPU.
        model: The model that chose the config.
    """

    pass_name: str
    problem: str
    variant: str
    config: Mapping[str, Value]
    record: str
    source: str
    code: str
    compiler: str
    predicted_us: float
    floor_us: float
    feasible: int
    compiled: int
    refused: tuple[str, ...]
    kernels: tuple[KernelReport, ...]
    host: tuple[HostProof, ...]
    model: ModelReport

    @property
    def label(self) -> str:
        """`variant(a=1, b=2)`, for people."""
        return Config.of(self.variant, self.config).label


@dataclass(frozen=True, slots=True)
class Predictions:
    """All predicted rows of one operator on one GPU, in the order of pass and problem."""

    operator: str
    gpu: str
    problems: tuple[Prediction, ...]
    schema: int = SCHEMA


def predictions_path(reports: Path, gpu: str) -> Path:
    """The path of a GPU's predictions in an operator's folder of reports."""
    return reports / FOLDER / f"{gpu}.yaml"


def load_predictions(path: Path) -> Predictions:
    """Read the predictions of a file for problems that are not measured yet.

    A tune that measures does not change this file. Its report, two folders above, says which
    problems are measured.

    Raises:
        RecordError: If the file cannot be read or deviates from the schema.
    """
    text = read_document(path, "no such predictions; kgen predict writes them")
    found = decode_as(Predictions, text, str(path), SCHEMA, "predict again")
    measured = measured_problems(path.parent.parent / path.name)
    kept = [p for p in found.problems if (p.pass_name, p.problem) not in measured]
    return replace(found, problems=tuple(kept))


def measured_problems(report: Path) -> frozenset[tuple[str, str]]:
    """Pass and problem of each entry of a measured report; empty if there is none."""
    if not report.exists():
        return frozenset()
    return frozenset((p.pass_name, p.problem) for p in load_report(report).problems)


def update_predictions(path: Path, found: Predictions) -> Predictions:
    """Merge predictions into a file, each replacing an earlier one of its problem; return all.

    Raises:
        RecordError: As for `load_predictions`.
        StorageError: If the file cannot be written.
    """
    known = load_predictions(path).problems if path.exists() else ()
    merged = {(p.pass_name, p.problem): p for p in (*known, *found.problems)}
    order = sorted(merged, key=lambda key: (key[0] != "forward", key))
    found = replace(found, problems=tuple(merged[key] for key in order))
    header = f"Predictions of {found.operator} for {found.gpu}, written by kgen: none is measured."
    write_whole(path, encode_as(found, header, found.schema))
    return found


def print_predictions(found: Predictions) -> str:
    """Return the predictions as text; empty if there are none."""
    if not found.problems:
        return ""
    lines = [f"{found.operator} on {found.gpu}: predicted, not measured"]
    for p in found.problems:
        lines += [
            f"  {p.pass_name} {p.problem}",
            f"    predicted  about {p.predicted_us:.4g} us (floor {p.floor_us:.4g}), {p.label}, "
            f"record {p.record}",
            f"    model      {p.model.name}, learnt from {p.model.problems} searched problems of "
            f"{' and '.join(p.model.gpus)}",
            f"    compiled   {p.compiled} of {p.feasible} feasible configs with {p.compiler}, "
            f"{len(p.refused)} refused",
            *(f"    verified   on the CPU: {len(run.inputs)} input sets x {len(run.orders)} thread "
              f"orders, {run.compiler.split()[0]}" for run in p.host),
        ]
    command = f"kgen tune --op {found.operator} --gpu {found.gpu}"
    return "\n".join([*lines, f"  next: {command} on a machine with that GPU"]) + "\n"

