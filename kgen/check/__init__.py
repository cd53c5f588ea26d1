"""Verify a kernel against the float64 definition of its operator."""

from kgen.check.case import Case
from kgen.check.check import LAUNCHES, Bind, Level, Workspaces, no_workspaces, verify
from kgen.check.errors import fault_of, other_values
from kgen.check.fixture import Admits, Fixture, guard_numbers
from kgen.check.input_set import InputSet
from kgen.check.sizes import HOST_SIZES, PROOF_SIZES, Sizes
from kgen.check.verdict import Verdict

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
    "fault_of",
    "guard_numbers",
    "no_workspaces",
    "other_values",
    "verify",
]
