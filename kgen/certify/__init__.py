"""`kgen verify`: check kernels against the float64 definition, without timing them."""

from kgen.certify.certify import Checked, check_problem, check_record

__all__ = ["Checked", "check_problem", "check_record"]
