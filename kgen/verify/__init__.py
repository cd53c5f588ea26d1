"""Check kernels with the full set of inputs: configs of a space, or kernels of a library."""

from kgen.verify.checker import Checked, Checker
from kgen.verify.covering import covering_rows, pairs_of
from kgen.verify.drawn import drawn_problems
from kgen.verify.library import LibraryCheck, OnDevice, OnHost, Subject, served_subjects

__all__ = [
    "Checked",
    "Checker",
    "LibraryCheck",
    "OnDevice",
    "OnHost",
    "Subject",
    "covering_rows",
    "drawn_problems",
    "pairs_of",
    "served_subjects",
]
