"""Tune an operator's pass on one GPU: search, verify, measure, choose."""

from kgen.tune.engine import tune
from kgen.tune.request import (
    Finalist,
    Limits,
    ProblemResult,
    Progress,
    SafeResult,
    TuneRequest,
    TuneResult,
)
from kgen.tune.sweep import Sweep, opened_sweep

__all__ = [
    "Finalist",
    "Limits",
    "ProblemResult",
    "Progress",
    "SafeResult",
    "Sweep",
    "TuneRequest",
    "TuneResult",
    "opened_sweep",
    "tune",
]
