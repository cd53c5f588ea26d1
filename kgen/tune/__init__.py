"""`kgen tune`: search, verify, measure, choose, confirm, publish."""

from kgen.tune.engine import tune
from kgen.tune.events import (
    PassDone,
    ProblemConfirmed,
    ProblemStarted,
    Progress,
    StageStarted,
    TrialRecorded,
    TuneEvent,
    pass_results,
)
from kgen.tune.job import PassPublished, PublishEvent, check_folder_writable, tune_and_publish
from kgen.tune.publish import Published, publish, winner_of
from kgen.tune.request import Limits, TuneRequest, default_trials, journal_path, study_path
from kgen.tune.results import Finalist, PassResult, ProblemResult, SafeResult
from kgen.tune.sweep import Sweep, open_sweep

__all__ = [
    "Finalist",
    "Limits",
    "PassDone",
    "PassPublished",
    "PassResult",
    "ProblemConfirmed",
    "ProblemResult",
    "ProblemStarted",
    "Progress",
    "PublishEvent",
    "Published",
    "SafeResult",
    "StageStarted",
    "Sweep",
    "TrialRecorded",
    "TuneEvent",
    "TuneRequest",
    "check_folder_writable",
    "default_trials",
    "journal_path",
    "open_sweep",
    "pass_results",
    "publish",
    "study_path",
    "tune",
    "tune_and_publish",
    "winner_of",
]
