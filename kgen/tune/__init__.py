"""Tune an operator's pass on one GPU: search, verify, measure, choose."""

from kgen.tune.engine import tune
from kgen.tune.request import Progress, ProblemResult, SafeResult, TuneRequest, TuneResult

__all__ = ["Progress", "ProblemResult", "SafeResult", "TuneRequest", "TuneResult", "tune"]
