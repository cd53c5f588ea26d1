"""`kgen bench`: compare verified kernels with peers; published ladders; profiles."""

from kgen.bench.job import BenchJob, BenchReport, load_bench, run_bench, write_bench
from kgen.bench.printing import print_calls, print_comparison, print_ladder, print_profile
from kgen.bench.results import (
    CallTable,
    ChosenConfig,
    LadderResult,
    LadderStepResult,
    PeerComparison,
    PeerTime,
    Profile,
    TimedKernel,
)

__all__ = [
    "BenchJob",
    "BenchReport",
    "CallTable",
    "ChosenConfig",
    "LadderResult",
    "LadderStepResult",
    "PeerComparison",
    "PeerTime",
    "Profile",
    "TimedKernel",
    "load_bench",
    "print_calls",
    "print_comparison",
    "print_ladder",
    "print_profile",
    "run_bench",
    "write_bench",
]
