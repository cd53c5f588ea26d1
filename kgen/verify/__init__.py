"""No timing without a verdict: prove a kernel right against its operator's float64 oracle."""

from kgen.verify.cases import PROOF_SIZES, Case
from kgen.verify.check import LAUNCHES, Bind, Level, Workspaces, no_workspaces, verify
from kgen.verify.fixture import Admits, Fixture, InputSet, guard_numbers
from kgen.verify.verdict import Verdict

__all__ = [
    "LAUNCHES",
    "PROOF_SIZES",
    "Admits",
    "Bind",
    "Case",
    "Fixture",
    "InputSet",
    "Level",
    "Verdict",
    "Workspaces",
    "guard_numbers",
    "no_workspaces",
    "verify",
]
