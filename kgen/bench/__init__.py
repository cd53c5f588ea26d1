"""`kgen bench`: verified kernels beside their peers, published ladders, profiles."""

from kgen.bench.contest import run_contest
from kgen.bench.ladder import climb
from kgen.bench.printing import print_climb, print_contest, print_profile
from kgen.bench.profile import run_profile
from kgen.bench.results import Choice, Climb, Contest, Kernel, PeerTime, Profile, Rung

__all__ = [
    "Choice",
    "Climb",
    "Contest",
    "Kernel",
    "PeerTime",
    "Profile",
    "Rung",
    "climb",
    "print_climb",
    "print_contest",
    "print_profile",
    "run_contest",
    "run_profile",
]
