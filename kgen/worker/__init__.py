"""Trials in a process that may die."""

from kgen.worker.handle import WorkerHandle
from kgen.worker.messages import (
    CallCosts,
    CallCostsOutcome,
    Candidate,
    Finals,
    FinalsOutcome,
    PeerNames,
    PeerNamesOutcome,
    Probe,
    ProbeOutcome,
    Setup,
    Trace,
    TraceOutcome,
    Trial,
    TrialOutcome,
)
from kgen.worker.proof import HostProver, Proof, with_proof
from kgen.worker.sanitizer import ComputeSanitizer
from kgen.worker.session import Session, failed_build, trial_key

__all__ = [
    "CallCosts",
    "CallCostsOutcome",
    "Candidate",
    "ComputeSanitizer",
    "Finals",
    "FinalsOutcome",
    "HostProver",
    "PeerNames",
    "PeerNamesOutcome",
    "Probe",
    "ProbeOutcome",
    "Proof",
    "Session",
    "Setup",
    "Trace",
    "TraceOutcome",
    "Trial",
    "TrialOutcome",
    "WorkerHandle",
    "failed_build",
    "trial_key",
    "with_proof",
]
