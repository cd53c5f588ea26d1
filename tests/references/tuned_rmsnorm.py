"""The tune of rmsnorm on the host with which the tests of commands begin."""

from __future__ import annotations

TINY = "M=33,N=128,dtype=fp32"
TRIALS = 4


def tune_arguments(problem: str, trials: int) -> list[str]:
    """Return the arguments of `kgen`."""
    named = ("tune", "--op", "rmsnorm", "--gpu", "host", "--pass", "forward", "--no-peers")
    return [*named, "--problem", problem, "--trials", str(trials)]
