"""The request of a prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.build import Compiler
from kgen.catalogue import Entry
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.predict.models import DEFAULT

DEFAULT_COMPILED = 24
"""Configs that are compiled for each problem; each takes 0.5 to 2 s."""


@dataclass(frozen=True)
class PredictRequest:
    """Predictions of an operator for one GPU.

    Attributes:
        entry: The operator with its space and templates.
        problems: The problems by pass.
        gpu: Profile of the GPU; it need not be in this machine.
        compiler: A compiler for the GPU.
        out: Folder of the library.
        reports: The operator's folder of reports in that library.
        relatives: Other operators of its family, from whose searches the model learns as well.
        libraries: Folders of libraries whose recorded searches the model learns from.
        paths: The `--path` folders, for the workers.
        seed: The seed of the inputs of host runs.
        compiled: Most configs to compile for each problem.
        model: One of `kgen.predict.models.MODELS`.
    """

    entry: Entry
    problems: Mapping[str, tuple[Problem, ...]]
    gpu: GpuProfile
    compiler: Compiler
    out: Path
    reports: Path
    relatives: tuple[Entry, ...]
    libraries: tuple[Path, ...]
    paths: tuple[str, ...]
    seed: int
    compiled: int = DEFAULT_COMPILED
    model: str = DEFAULT

    @property
    def journal(self) -> Path:
        """The file of the certificates, which is separate from the journal of measured trials."""
        return self.reports / "predicted" / f"{self.gpu.name}.jsonl"
