"""Runs one trial in its own process, for compute-sanitizer, which watches whole processes.

    python -m kgen.worker.alone JOB

JOB is a pickle of (Setup, Trial); the outcome is pickled beside it, as JOB.out.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from kgen.catalogue import open_catalogue
from kgen.errors import KgenError
from kgen.model.record import Fate
from kgen.worker.messages import Setup, Trial, TrialOutcome


def main(job: Path) -> None:
    """Run the trial of a job file."""
    from kgen.worker.runner import Runner

    setup, trial = pickle.loads(job.read_bytes())
    assert isinstance(setup, Setup)
    assert isinstance(trial, Trial)
    try:
        operator = open_catalogue(setup.paths).operator(setup.operator)
        outcome = Runner(operator, setup).trial(trial)
    except KgenError as problem:
        outcome = TrialOutcome(Fate.CRASHED, str(problem))
    job.with_suffix(".out").write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
