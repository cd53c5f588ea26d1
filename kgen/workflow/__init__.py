"""Whole jobs made of verbs: tune, then emit, then report; choose, then bench."""

from kgen.workflow.benching import BenchJob, BenchReport, load_bench, run_bench, write_bench
from kgen.workflow.learning import LearnJob, Learnt, learn
from kgen.workflow.learning_report import load_learning, print_learning
from kgen.workflow.publish import Published, publish
from kgen.workflow.tuning import TuneJob, run_job

__all__ = [
    "BenchJob",
    "BenchReport",
    "LearnJob",
    "Learnt",
    "Published",
    "TuneJob",
    "learn",
    "load_bench",
    "load_learning",
    "print_learning",
    "publish",
    "run_bench",
    "run_job",
    "write_bench",
]
