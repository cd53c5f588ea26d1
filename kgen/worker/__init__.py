"""Trials in a process that may die."""

from kgen.worker.handle import WorkerHandle
from kgen.worker.messages import (
    Candidate,
    Finals,
    FinalsOutcome,
    PeerNames,
    PeerNamesOutcome,
    Probe,
    ProbeOutcome,
    Setup,
    Trial,
    TrialOutcome,
)
from kgen.worker.session import Session, failed_build, trial_key

__all__ = [
    "Candidate",
    "Finals",
    "FinalsOutcome",
    "PeerNames",
    "PeerNamesOutcome",
    "Probe",
    "ProbeOutcome",
    "Session",
    "Setup",
    "Trial",
    "TrialOutcome",
    "WorkerHandle",
    "failed_build",
    "trial_key",
]
