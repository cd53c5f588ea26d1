"""What a call costs the host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallCost:
    """Host time of one call, from Python and back; the device works on meanwhile.

    Attributes:
        name: Whose call.
        median_us: Median over rounds.
        low_us: First quartile.
        high_us: Third quartile.
        rounds: How many rounds there were.
        calls: Calls in each.
    """

    name: str
    median_us: float
    low_us: float
    high_us: float
    rounds: int
    calls: int
