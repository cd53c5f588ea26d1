"""Whole jobs made of verbs: tune, then emit, then report; choose, then bench."""

from kgen.workflow.benching import BenchJob, BenchReport, load_bench, run_bench, write_bench
from kgen.workflow.publish import Published, publish
from kgen.workflow.tuning import TuneJob, run_job

__all__ = [
    "BenchJob",
    "BenchReport",
    "Published",
    "TuneJob",
    "load_bench",
    "publish",
    "run_bench",
    "run_job",
    "write_bench",
]
