"""The child process that runs trials and may crash, and its messages to the parent."""

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
