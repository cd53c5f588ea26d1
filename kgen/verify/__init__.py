"""No timing without a verdict: prove a kernel right against its operator's float64 oracle."""

from kgen.verify.cases import HOST_SIZES, PROOF_SIZES, Case, Sizes
from kgen.verify.check import LAUNCHES, Bind, Level, Workspaces, no_workspaces, verify
from kgen.verify.fixture import Admits, Fixture, InputSet, guard_numbers
from kgen.verify.verdict import Verdict

__all__ = [
    "HOST_SIZES",
    "LAUNCHES",
    "PROOF_SIZES",
    "Admits",
    "Bind",
    "Case",
    "Fixture",
    "InputSet",
    "Level",
    "Sizes",
    "Verdict",
    "Workspaces",
    "guard_numbers",
    "no_workspaces",
    "verify",
]
