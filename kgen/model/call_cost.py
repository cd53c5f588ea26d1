"""What a call costs the host, and how long its results take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallCost:
    """Host time of one call, from Python and back; the device works on meanwhile. And how long it
    takes until the device is done, if nothing else is on its way.

    Attributes:
        name: Whose call.
        median_us: Median over rounds.
        low_us: First quartile.
        high_us: Third quartile.
        done_us: From the call until a wait for the device is over, median over rounds.
        rounds: How many rounds there were.
        calls: Calls in each.
    """

    name: str
    median_us: float
    low_us: float
    high_us: float
    done_us: float
    rounds: int
    calls: int
