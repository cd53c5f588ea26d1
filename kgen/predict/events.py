"""The events of a prediction: one frozen object for each step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kgen.model.problem import Problem
from kgen.predict.request import PredictRequest
from kgen.report.predictions import Prediction


@dataclass(frozen=True)
class PassStarted:
    """A model has learnt; the predictions of a pass begin.

    Attributes:
        pass_name: `forward` or `backward`.
        gpus: The GPUs whose measured times the model was fitted to.
        searched: Number of searched problems.
        configs: Number of their measured configs.
    """

    pass_name: str
    gpus: tuple[str, ...]
    searched: int
    configs: int


@dataclass(frozen=True)
class Skipped:
    """A problem is skipped, because it has a measured row of this GPU."""

    pass_name: str
    problem: Problem


@dataclass(frozen=True)
class Compiling:
    """The most promising configs of a problem are being compiled."""

    pass_name: str
    problem: Problem
    feasible: int
    compiled: int


@dataclass(frozen=True)
class HostRunStarted:
    """A config of a problem is being run on the CPU."""

    pass_name: str
    problem: Problem
    config: str


@dataclass(frozen=True)
class Predicted:
    """A problem's row is in the library and in the report.

    Attributes:
        request: The prediction.
        prediction: The prediction that was written.
        report: The report's file.
    """

    request: PredictRequest
    prediction: Prediction
    report: Path


PredictEvent: TypeAlias = PassStarted | Skipped | Compiling | HostRunStarted | Predicted
