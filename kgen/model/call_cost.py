"""The host cost of a call, and the latency of its results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallCost:
    """Host time of one call, from Python and back, and the latency until the device has finished.

    Attributes:
        name: The name of the contender.
        median_us: Median over rounds.
        low_us: First quartile.
        high_us: Third quartile.
        done_us: From the call until the device has finished, on an idle device; median over rounds.
        rounds: Number of rounds.
        calls: Calls per round.
    """

    name: str
    median_us: float
    low_us: float
    high_us: float
    done_us: float
    rounds: int
    calls: int
