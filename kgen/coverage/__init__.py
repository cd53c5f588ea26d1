"""`kgen coverage`: the kernel that the library runs for each problem of a list, and its time."""

from kgen.coverage.job import CoverageRequest, Timing, coverage
from kgen.coverage.mapping import population_map
from kgen.coverage.model import CoverageReport, CoveredProblem, load_coverage, write_coverage
from kgen.coverage.printing import print_coverage, print_problem

__all__ = [
    "CoverageReport",
    "CoverageRequest",
    "CoveredProblem",
    "Timing",
    "coverage",
    "load_coverage",
    "population_map",
    "print_coverage",
    "print_problem",
    "write_coverage",
]
