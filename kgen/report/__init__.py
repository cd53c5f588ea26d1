"""The written report of a tune: YAML with documented keys, checked on load, printed for people."""

from kgen.report.codec import decode_as, encode_as
from kgen.report.model import (
    Chosen,
    Environment,
    HostProof,
    KernelReport,
    Peer,
    ProblemReport,
    Proof,
    Report,
    RuleCount,
    RunnerUp,
    SpaceSummary,
    Trials,
)
from kgen.report.printing import print_report
from kgen.report.storage import (
    load_report,
    merge_reports,
    update_report,
    write_report,
    write_whole,
)

__all__ = [
    "Chosen",
    "Environment",
    "HostProof",
    "KernelReport",
    "Peer",
    "ProblemReport",
    "Proof",
    "Report",
    "RuleCount",
    "RunnerUp",
    "SpaceSummary",
    "Trials",
    "decode_as",
    "encode_as",
    "load_report",
    "merge_reports",
    "print_report",
    "update_report",
    "write_report",
    "write_whole",
]
