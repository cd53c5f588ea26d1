"""Check the repeatability of the timing protocol on this machine; docs/measurement.md."""

from kgen.measure_check.bars import BarResult, judge_bars
from kgen.measure_check.check import MeasureCheck, check_quality
from kgen.measure_check.document import check_file_writable, write_quality
from kgen.measure_check.model import Quality
from kgen.measure_check.printing import print_bars, print_problem

__all__ = [
    "BarResult",
    "MeasureCheck",
    "Quality",
    "check_file_writable",
    "check_quality",
    "judge_bars",
    "print_bars",
    "print_problem",
    "write_quality",
]
