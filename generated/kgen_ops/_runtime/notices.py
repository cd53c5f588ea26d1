"""Warnings and statistics about calls that no tuned kernel could serve.

Such a call gets the operator's safe kernel, which is correct for every problem and may be a hundred
times slower than a tuned one. The first call of a problem warns; `misses()` lists all of them.

A call that a predicted row serves gets a kernel that a model chose and that was not timed on a GPU.
The first call of such a problem also warns, but the problem is not in `misses()`.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

SILENCE = "KGEN_WARN"
SHOWN = 2  # most reasons in a warning


class KgenPerformanceWarning(UserWarning):
    """A call is served by an untuned kernel, or by a kernel that was never timed on this GPU."""


class Miss(NamedTuple):
    """A problem that the safe kernel served.

    Attributes:
        function: The public function.
        problem: The problem, in the form of `kgen tune --problem`.
        device: The device that ran it.
        config: The safe kernel.
        calls: Number of calls in this process.
        refused: Why better kernels could not serve it; empty if there was none.
        command: The command that tunes a kernel for it.
    """

    function: str
    problem: str
    device: str
    config: str
    calls: int
    refused: tuple[str, ...]
    command: str


class SafeCalls:
    """Counts the calls of a problem that the safe kernel serves.

    Attributes:
        fast_paths: The fast paths that serve such calls; each counts its own calls.
    """

    def __init__(self, miss: Miss) -> None:
        self._miss = miss
        self._calls = 0
        self.fast_paths: list[Any] = []

    def counted(self, launch: Callable[..., None]) -> Callable[..., None]:
        """Wrap a launch so that its calls are counted."""
        @functools.wraps(launch)
        def launch_and_count(*arguments: Any) -> None:
            self._calls += 1
            launch(*arguments)

        return launch_and_count

    def add(self) -> None:
        """Count a call."""
        self._calls += 1

    @property
    def miss(self) -> Miss:
        """The problem with the number of calls so far."""
        return self._miss._replace(
            calls=self._calls + sum(path.served for path in self.fast_paths))


_found: dict[tuple[str, str, str], SafeCalls] = {}


def note(miss: Miss) -> SafeCalls:
    """Count a call that the safe kernel served; warn at the first call of a problem."""
    key = (miss.function, miss.problem, miss.device)
    if key not in _found:
        _found[key] = SafeCalls(miss)
        if os.environ.get(SILENCE) != "0":
            why = "".join(f"\n  refused: {reason.splitlines()[0]:.400}" for reason in
                          miss.refused[:SHOWN])
            more = len(miss.refused) - SHOWN
            why += f"\n  refused: {more} more, see misses()" if more > 0 else ""
            warnings.warn(KgenPerformanceWarning(
                f"{miss.function}: no tuned kernel serves {miss.problem} on {miss.device}, so "
                f"{miss.config} does, which may be much slower{why}\n  run: {miss.command}\n"
                f"  silence: {SILENCE}=0; all such calls: misses()"
            ), stacklevel=2)
    _found[key].add()
    return _found[key]


_predicted: set[tuple[str, str, str]] = set()


def note_prediction(
    function: str, problem: str, device: str, config: str, command: str
) -> None:
    """Warn at the first call of a problem that a predicted row serves.

    Args:
        function: The public function.
        problem: The problem, in the form of `kgen tune --problem`.
        device: The device that runs it.
        config: The predicted kernel.
        command: The command that measures the problem.
    """
    key = (function, problem, device)
    if key in _predicted:
        return
    _predicted.add(key)
    if os.environ.get(SILENCE) != "0":
        warnings.warn(KgenPerformanceWarning(
            f"{function}: the kernel for {problem} on {device} was predicted, not measured: "
            f"{config}\n  it was verified on the CPU; another may be faster\n  run: {command}\n"
            f"  silence: {SILENCE}=0"
        ), stacklevel=2)


def misses() -> tuple[Miss, ...]:
    """Return the problems that safe kernels served in this process, the most called first.

    Print how to tune for them:

        for miss in kgen_ops.misses():
            print(miss.calls, miss.problem, miss.command)
    """
    found = (calls.miss for calls in list(_found.values()))
    return tuple(sorted(found, key=lambda miss: -miss.calls))
