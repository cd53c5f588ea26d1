"""How a command knows that another kgen process started it."""

HELPER = "KGEN_HELPER"
"""Environment variable of the workers that `kgen tune --devices` starts. The tuner ends them by a
signal when it is done, which nobody has to be told.
"""
