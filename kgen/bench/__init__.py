"""`kgen bench`: verified kernels beside their peers, published ladders, profiles."""

from kgen.bench.calls import run_call_costs
from kgen.bench.contest import run_contest
from kgen.bench.ladder import climb
from kgen.bench.printing import print_calls, print_climb, print_contest, print_profile
from kgen.bench.profile import run_profile
from kgen.bench.results import CallTable, Choice, Climb, Contest, Kernel, PeerTime, Profile, Rung

__all__ = [
    "CallTable",
    "Choice",
    "Climb",
    "Contest",
    "Kernel",
    "PeerTime",
    "Profile",
    "Rung",
    "climb",
    "print_calls",
    "print_climb",
    "print_contest",
    "print_profile",
    "run_call_costs",
    "run_contest",
    "run_profile",
]
