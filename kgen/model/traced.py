"""What a profiler's trace says of one contender."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traced:
    """Where the time of a contender's calls goes. Times are of one call, under the profiler.

    Attributes:
        name: Of the contender; its stretch of the trace is called so, too.
        calls: How many were traced.
        end_to_end_us: From the first call to the device's last answer, over the calls: launches
            and all that Python does are in it.
        kernels: How many kernels ran; on a CPU, operators of PyTorch.
        busy_us: What all kernels took.
        largest: The kernel that took the most, all its launches together; empty if the profiler
            saw none.
        largest_us: What it took.
    """

    name: str
    calls: int
    end_to_end_us: float
    kernels: float
    busy_us: float
    largest: str
    largest_us: float
