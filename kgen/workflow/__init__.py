"""Whole jobs made of verbs: tune, then emit, then report."""

from kgen.workflow.publish import Published, publish
from kgen.workflow.tuning import TuneJob, run_job

__all__ = ["Published", "TuneJob", "publish", "run_job"]
