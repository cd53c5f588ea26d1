"""`kgen tune`: search, verify, measure, choose, confirm, publish."""

from kgen.tune.agreement import Agreement
from kgen.tune.announcement import TuneSpec
from kgen.tune.engine import forget_study_without_journal, tune
from kgen.tune.events import (
    PassDone,
    ProblemConfirmed,
    ProblemStarted,
    Progress,
    SafeCertified,
    StageAdvanced,
    StageStarted,
    TrialRecorded,
    TuneEvent,
    pass_results,
)
from kgen.tune.helping import HelpEvent, TuneJoined, TuneLeft, help_tunes
from kgen.tune.job import PassPublished, PublishEvent, check_folder_writable, tune_and_publish
from kgen.tune.publish import Published, publish, winner_of
from kgen.tune.request import (
    Limits,
    SharedStorage,
    TuneRequest,
    default_trials,
    journal_path,
    study_path,
)
from kgen.tune.results import Finalist, PassResult, ProblemResult, SafeResult
from kgen.tune.served_configs import served_configs
from kgen.tune.sweep import Sweep, open_sweep

__all__ = [
    "Agreement",
    "Finalist",
    "HelpEvent",
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
    "SafeCertified",
    "SafeResult",
    "SharedStorage",
    "StageAdvanced",
    "StageStarted",
    "Sweep",
    "TrialRecorded",
    "TuneEvent",
    "TuneJoined",
    "TuneLeft",
    "TuneRequest",
    "TuneSpec",
    "check_folder_writable",
    "default_trials",
    "forget_study_without_journal",
    "help_tunes",
    "journal_path",
    "open_sweep",
    "pass_results",
    "publish",
    "served_configs",
    "study_path",
    "tune",
    "tune_and_publish",
    "winner_of",
]
