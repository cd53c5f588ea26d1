"""Compare two times of one interleaved run: faster, slower or a tie.

Two medians are a tie if their quartile intervals overlap. Both intervals are from the samples of
one run, in which all contenders took turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Literal

from kgen.model.record import Timing
from kgen.report.model import ProblemReport
from kgen.report.tables import ReportRow

Standing = Literal["faster", "tie", "slower", "alone"]


def is_tie(one: Timing, other: Timing) -> bool:
    """Whether the quartile intervals of two times overlap."""
    return one.low_us <= other.high_us and other.low_us <= one.high_us


def standing(entry: ProblemReport) -> Standing:
    """The winner compared with its fastest peer: faster, slower, tie; `alone` without a peer."""
    fastest = min(entry.peers, key=lambda peer: peer.timing.median_us, default=None)
    if fastest is None:
        return "alone"
    if is_tie(entry.chosen.timing, fastest.timing):
        return "tie"
    ours = entry.chosen.timing.median_us
    return "faster" if ours < fastest.timing.median_us else "slower"


def runner_up_is_tie(entry: ProblemReport) -> bool:
    """Whether the runner-up's median lies within the winner's quartiles, or is below them.

    Reports keep only the median of the runner-up.
    """
    second = entry.runner_up
    return second is not None and second.median_us <= entry.chosen.timing.high_us


def spell_standing(row: ReportRow) -> str:
    """`1.60x liger`, `tie   torch.compile`, `0.93x fla (slower)`; empty without a peer."""
    fastest, ratio = row.fastest, row.ratio
    if fastest is None or ratio is None:
        return "no peer timed"
    match standing(row.report):
        case "tie":
            return f"tie   {fastest.name}"
        case "slower":
            return f"{_spelled(ratio)} {fastest.name} (slower)"
        case _:
            return f"{_spelled(ratio)} {fastest.name}"


def _spelled(ratio: float) -> str:
    """A ratio as `1.60x`, with one more digit if it would read `1.00x`."""
    return f"{ratio:.3f}x" if abs(ratio - 1) < 0.01 else f"{ratio:.2f}x"


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of problems with each standing.

    Attributes:
        faster: Problems on which the winner beats every peer.
        tie: Problems on which the winner and the fastest peer tie.
        slower: Problems on which a peer is faster.
        alone: Problems without a peer.
        mean_ratio: Geometric mean of the fastest peer's time over kgen's; None without peers.
    """

    faster: int
    tie: int
    slower: int
    alone: int
    mean_ratio: float | None

    @classmethod
    def of(cls, rows: Sequence[ReportRow]) -> Tally:
        """Count the standings."""
        all_of = [standing(row.report) for row in rows]
        ratios = [row.ratio for row in rows if row.ratio is not None]
        mean = exp(sum(map(log, ratios)) / len(ratios)) if ratios else None
        counts = {name: all_of.count(name) for name in ("faster", "tie", "slower", "alone")}
        return cls(**counts, mean_ratio=mean)

    def __str__(self) -> str:
        named = {"faster": self.faster, "tied": self.tie, "slower": self.slower,
                 "without a peer": self.alone}
        parts = [f"{count} {name}" for name, count in named.items() if count]
        if self.mean_ratio is not None:
            parts.append(f"mean {self.mean_ratio:.2f}x")
        return ", ".join(parts)
