"""How well the timing protocol agrees with itself on the machine at hand; docs/measurement.md."""

from kgen.workflow.quality.check import QualityJob, check_quality
from kgen.workflow.quality.document import check_writable, write_quality
from kgen.workflow.quality.model import Quality
from kgen.workflow.quality.text import print_problem, print_verdicts
from kgen.workflow.quality.verdicts import Verdict, verdicts

__all__ = [
    "Quality",
    "QualityJob",
    "Verdict",
    "check_quality",
    "check_writable",
    "print_problem",
    "print_verdicts",
    "verdicts",
    "write_quality",
]
