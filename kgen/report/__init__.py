"""The report of a tune: YAML with documented keys, checked when loaded, printed as text."""

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
from kgen.report.picture import draw_svg
from kgen.report.printing import print_report
from kgen.report.searches import Search
from kgen.report.storage import (
    load_report,
    merge_reports,
    read_document,
    update_report,
    write_report,
    write_whole,
)
from kgen.report.tables import ReportRow, insert_summary, print_markdown, print_summary

__all__ = [
    "Chosen",
    "Environment",
    "HostProof",
    "KernelReport",
    "Peer",
    "ProblemReport",
    "Proof",
    "Report",
    "ReportRow",
    "RuleCount",
    "RunnerUp",
    "Search",
    "SpaceSummary",
    "Trials",
    "decode_as",
    "draw_svg",
    "encode_as",
    "insert_summary",
    "load_report",
    "merge_reports",
    "print_markdown",
    "print_report",
    "print_summary",
    "read_document",
    "update_report",
    "write_report",
    "write_whole",
]
