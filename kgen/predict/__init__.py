"""`kgen predict`: choose kernels for a GPU that is not in this machine, by a fitted model."""

from kgen.predict.events import (
    Compiling,
    HostRunStarted,
    PassStarted,
    Predicted,
    PredictEvent,
    Skipped,
)
from kgen.predict.job import predict
from kgen.predict.judge import Judgement, judge, print_judgements
from kgen.predict.rankings import ranking_from, rankings, samples
from kgen.predict.request import PredictRequest
from kgen.predict.training import relatives

__all__ = [
    "Compiling",
    "HostRunStarted",
    "Judgement",
    "PassStarted",
    "PredictEvent",
    "PredictRequest",
    "Predicted",
    "Skipped",
    "judge",
    "predict",
    "print_judgements",
    "ranking_from",
    "rankings",
    "relatives",
    "samples",
]
