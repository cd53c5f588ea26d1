"""The summary of a profiler's trace for one contender."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traced:
    """The time of a contender's calls, per call, under the profiler.

    Attributes:
        name: The name of the contender and of its span in the trace.
        calls: Number of traced calls.
        end_to_end_us: Time from the first call until the device has finished, divided by the number
            of calls; includes launches and Python.
        kernels: Number of kernels; on a CPU, of PyTorch operators.
        busy_us: Time of all kernels.
        largest: The kernel with the largest total time; empty if the profiler recorded none.
        largest_us: Time of that kernel.
    """

    name: str
    calls: int
    end_to_end_us: float
    kernels: float
    busy_us: float
    largest: str
    largest_us: float
