"""The environment variable by which a command knows that another kgen process started it."""

HELPER = "KGEN_HELPER"
"""Set for the workers that `kgen tune --devices` starts. The tuner ends them by a signal when it is
done, so they print nothing about the signal.
"""
