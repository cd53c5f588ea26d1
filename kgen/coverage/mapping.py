"""A coverage as a map of the HTML report."""

from __future__ import annotations

from kgen.coverage.model import CoverageReport
from kgen.coverage.printing import print_coverage
from kgen.errors import ProblemError, RecordError
from kgen.model.names import short_name
from kgen.model.problem import parse_problem
from kgen.model.signature import Signature
from kgen.report.population_map import MappedProblem, PopulationMap


def population_map(report: CoverageReport, signature: Signature) -> PopulationMap:
    """Return the map of a coverage.

    Raises:
        RecordError: If a problem is not one of the operator.
    """
    problems = tuple(
        MappedProblem(
            pass_name=found.pass_name, name=_name(found.problem, report, signature),
            step=found.step, config=found.config, us=found.kernel_us, floor=found.floor_us,
            peer=found.peer, peer_us=found.peer_us, ratio=found.ratio, loss=found.loss,
            failed=found.failed,
        )
        for found in report.problems
    )
    return PopulationMap(report.operator, report.gpu, report.populations, problems,
                         print_coverage(report))


def _name(problem: str, report: CoverageReport, signature: Signature) -> str:
    try:
        return short_name(parse_problem(problem, signature), signature)
    except ProblemError as wrong:
        raise RecordError(
            f"the coverage of {report.operator} on {report.gpu} is of another signature: {wrong}\n"
            "  run kgen coverage again"
        ) from None
