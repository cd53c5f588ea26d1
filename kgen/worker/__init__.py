"""The child process that runs trials and may die of one, and what it and its parent say."""

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

__all__ = [
    "CallCosts",
    "CallCostsOutcome",
    "Candidate",
    "Finals",
    "FinalsOutcome",
    "PeerNames",
    "PeerNamesOutcome",
    "Probe",
    "ProbeOutcome",
    "Setup",
    "Trace",
    "TraceOutcome",
    "Trial",
    "TrialOutcome",
]
