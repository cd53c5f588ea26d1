"""`kgen bench`: verified kernels beside their peers, or the steps of a published ladder."""

from kgen.bench.contest import run_contest
from kgen.bench.ladder import climb
from kgen.bench.printing import print_climb, print_contest
from kgen.bench.results import Choice, Climb, Contest, Kernel, PeerTime, Rung

__all__ = [
    "Choice",
    "Climb",
    "Contest",
    "Kernel",
    "PeerTime",
    "Rung",
    "climb",
    "print_climb",
    "print_contest",
    "run_contest",
]
