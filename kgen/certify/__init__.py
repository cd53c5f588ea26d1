"""`kgen verify`: check kernels against the float64 definition, without timing them."""

from kgen.certify.certify import Checked, Checker

__all__ = ["Checked", "Checker"]
