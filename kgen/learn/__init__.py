"""Learn which row serves a problem that was not tuned: the problems to measure, and the fit."""

from kgen.learn.fit import ABSENT_LOSS, Fitted, Sample, fit_tree
from kgen.learn.grid import (
    Group,
    features,
    group_problems,
    held_out_problems,
    training_problems,
)

__all__ = [
    "ABSENT_LOSS",
    "Fitted",
    "Group",
    "Sample",
    "features",
    "fit_tree",
    "group_problems",
    "held_out_problems",
    "training_problems",
]
