"""Medians with distribution-free confidence intervals, and rankings from them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

INDIFFERENCE = 0.005
"""A relative difference below the resolution of the protocol (its A/A target)."""
LARGEST_TIE = 0.03
"""A relative difference above which there is no tie, however wide its interval. With the seven
rounds that a short budget leaves, the 95 % interval ends at the extreme samples. One interrupted
sample would then make a kernel tie that takes ten times as long."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and its confidence interval, in the unit of the samples.

    Attributes:
        median: Median of the samples.
        low: Lower end; -inf if there are too few samples for the confidence.
        high: Upper end; inf if there are too few samples for the confidence.
    """

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's length."""
        return (self.high - self.low) / 2


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile, interpolated; a single sample is both quartiles."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median with its order-statistic confidence interval.

    The number of samples below the true median is binomial(n, 1/2) whatever the distribution,
    so the k-th smallest and k-th largest sample enclose the true median with probability
    1 - 2 P(binomial(n, 1/2) < k). k is the largest number for which this probability is at least
    `confidence`. Fewer than six samples give no interval at 95 %.

    Raises:
        ValueError: If there is no sample.
    """
    if not samples:
        raise ValueError("the median of no samples is not defined")
    ordered = sorted(samples)
    n = len(ordered)
    tail, k = 0.0, 0
    while k < n // 2:
        tail += math.comb(n, k) / 2.0**n if n < 1000 else _normal_step(n, k)
        if 2 * tail > 1 - confidence:
            break
        k += 1
    middle = statistics.median(ordered)
    if k == 0:
        return Interval(middle, -math.inf, math.inf)
    return Interval(middle, ordered[k - 1], ordered[n - k])


def _normal_step(n: int, k: int) -> float:
    """P(binomial(n, 1/2) = k) where 2.0**n would overflow."""
    logs = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(logs - n * math.log(2))


def paired_difference(
    first: Sequence[float], second: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Return the median of (first - second) / second over rounds, with its interval.

    Samples of the same round share the state of clocks and temperature, which cancels in their
    difference. It would not cancel in a comparison of two medians.

    Raises:
        ValueError: If the sequences differ in length or are empty.
    """
    if len(first) != len(second):
        raise ValueError(f"pairs need equally many samples, got {len(first)} and {len(second)}")
    relative = [(a - b) / b for a, b in zip(first, second, strict=True)]
    return median_interval(relative, confidence)


@dataclass(frozen=True, slots=True)
class Contender:
    """A candidate to rank.

    Attributes:
        name: Key in the samples.
        registers: Registers per thread, the largest of the candidate's kernels.
        digest: The digest of its config; differs between contenders.
    """

    name: str
    registers: int
    digest: str


def rank(
    contenders: Sequence[Contender],
    samples: Mapping[str, Sequence[float]],
    indifference: float = INDIFFERENCE,
    confidence: float = 0.95,
) -> list[str]:
    """Order contenders, best first; ties are broken by fewer registers.

    The contender with the least median leads. Another contender ties with the leader unless the
    lower end of the interval of their paired difference exceeds `indifference`, or the difference
    itself exceeds `LARGEST_TIE`. Of the leader and the contenders that tie with it, the one with
    the fewest registers, then the smallest digest, takes the first place. The others are ranked in
    the same way. Small noise therefore changes the order only if it changes the ties.

    Args:
        contenders: The candidates.
        samples: By name, in us, of equal length, paired by round.
        indifference: Relative difference that counts as a tie.
        confidence: The confidence of the interval.
    """
    left = list(contenders)
    order: list[str] = []
    while left:
        tied = ties(left, samples, indifference, confidence)
        chosen = min(tied, key=lambda c: (c.registers, c.digest))
        order.append(chosen.name)
        left.remove(chosen)
    return order


def ties(
    contenders: Sequence[Contender],
    samples: Mapping[str, Sequence[float]],
    indifference: float = INDIFFERENCE,
    confidence: float = 0.95,
) -> list[Contender]:
    """Return the contender with the least median and all contenders that tie with it; see `rank`.

    Of contenders with equal medians the one with fewer registers, then the smaller digest, leads.
    """
    lead = min(
        contenders, key=lambda c: (statistics.median(samples[c.name]), c.registers, c.digest)
    )
    return [
        c
        for c in contenders
        if c is lead
        or _ties(
            paired_difference(samples[c.name], samples[lead.name], confidence), indifference
        )
    ]


def _ties(difference: Interval, indifference: float) -> bool:
    return difference.low <= indifference and difference.median <= LARGEST_TIE
