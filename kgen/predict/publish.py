"""Write a predicted row into the library, and into the report of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kgen.assets import include_dir
from kgen.emit import PACKAGE, Winner, emit, untuned_safe_kernels
from kgen.model.artifact import Artifact, Rendered
from kgen.model.config import Config
from kgen.model.plan import make_plan
from kgen.model.problem import Problem
from kgen.model.record import Record, Timing
from kgen.model.space import Variant
from kgen.predict.features import residency
from kgen.predict.request import PredictRequest
from kgen.predict.training import TrainingSearch
from kgen.report.kernels import kernel_reports
from kgen.report.model import HostProof
from kgen.report.predictions import (
    ModelReport,
    Prediction,
    Predictions,
    predictions_path,
    update_predictions,
)
from kgen.runtime.cache import read_file
from kgen.trial import HostRunResult


@dataclass(frozen=True)
class Choice:
    """The config that a model chose for a problem, verified on the CPU.

    Attributes:
        problem: The problem.
        variant: The variant of the config.
        config: The config.
        rendered: The config's source.
        artifact: The built module for the GPU.
        record: The certificate, without a time.
        run: The host runs.
        predicted_us: The model's estimate of the time.
        floor_us: The problem's floor.
        feasible: Number of configs that the rules allow.
        compiled: Number of configs that were compiled.
        refused: Why other configs could not be chosen, by label.
    """

    problem: Problem
    variant: Variant
    config: Config
    rendered: Rendered
    artifact: Artifact
    record: Record
    run: HostRunResult
    predicted_us: float
    floor_us: float
    feasible: int
    compiled: int
    refused: tuple[str, ...]


def publish(
    request: PredictRequest, pass_name: str, choice: Choice, searches: Sequence[TrainingSearch]
) -> tuple[Prediction, Path]:
    """Emit a predicted row, and merge the report of predictions.

    Returns:
        The report's entry, and its file.
    Raises:
        StorageError: If a file cannot be written; the earlier files then stay intact.
    """
    operator = request.entry.operator
    us = choice.predicted_us
    estimate = Timing(us, us, us, 0, "predicted, not measured")
    winner = Winner(
        operator=operator,
        pass_name=pass_name,
        problem=choice.problem,
        gpu=request.gpu,
        variant=choice.variant,
        config=choice.config,
        rendered=choice.rendered,
        cubin=read_file(choice.artifact.path),
        arch=request.gpu.arch,
        record=replace(choice.record, timing=estimate),
        predicted=True,
    )
    # Safe kernels that a tune has certified stay as they are.
    has_safe = (request.out / PACKAGE / operator.name / "safe.yaml").exists()
    safe = [] if has_safe else list(untuned_safe_kernels(request.entry, include_dir()))
    emit(request.out, [winner], safe, include_dir(), request.entry)
    prediction = _prediction(request, pass_name, choice, searches)
    path = predictions_path(request.reports, request.gpu.name)
    update_predictions(path, Predictions(operator.name, request.gpu.name, (prediction,)))
    return prediction, path


def _prediction(
    request: PredictRequest, pass_name: str, choice: Choice, searches: Sequence[TrainingSearch]
) -> Prediction:
    return Prediction(
        pass_name=pass_name,
        problem=str(choice.problem),
        variant=choice.config.variant,
        config=choice.config.as_dict(),
        record=choice.record.id,
        source=choice.rendered.digest,
        code=choice.record.code,
        compiler=f"{request.compiler.name} {request.compiler.version}",
        predicted_us=choice.predicted_us,
        floor_us=choice.floor_us,
        feasible=choice.feasible,
        compiled=choice.compiled,
        refused=choice.refused,
        kernels=kernel_reports(
            make_plan(choice.variant, choice.config, choice.problem, request.gpu),
            dict(choice.artifact.resources),
            lambda launch, used: None if launch.is_empty else residency(
                launch, used, request.gpu).occupancy,
        ),
        host=tuple(
            HostProof(run.compiler, run.orders, tuple(f"{t.case} @ {t.seed}" for t in run.tried))
            for run in choice.run.runs
        ),
        model=ModelReport(
            request.model,
            tuple(sorted({one.searched.gpu.name for one in searches})),
            len(searches),
        ),
    )
