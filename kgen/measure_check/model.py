"""The results of `kgen measure-check` and derived numbers. Ratios are shares, not per cent."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from kgen.measure.stats import Interval, median_interval


@dataclass(frozen=True, slots=True)
class SameRun:
    """One comparison of a kernel with itself, in a process of its own.

    Attributes:
        seed: The seed of the inputs and of the orders.
        medians_us: Median of each contender, in order of preparation.
        protocols: Timing protocol of each contender.
        differences: Paired difference of the first two contenders, of the next two, and so on;
            pairs that share no contender are independent.
        clocks: State of the GPU afterwards; empty if it cannot be read.
    """

    seed: int
    medians_us: tuple[float, ...]
    protocols: tuple[str, ...]
    differences: tuple[Interval, ...]
    clocks: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SameKernel:
    """A/A: one kernel entered under several names, in several runs."""

    config: str
    runs: tuple[SameRun, ...]

    @property
    def difference(self) -> Interval:
        """Median of |difference| over all pairs of all runs, with its 95 % interval."""
        return median_interval([abs(d.median) for run in self.runs for d in run.differences])

    @property
    def biases(self) -> tuple[float, ...]:
        """For each contender, the median over runs of its relative distance from the run's mean.

        Noise changes sign from run to run. A bias that stays with a contender's position is a fault
        of the protocol.
        """
        relative = [
            [median / statistics.mean(run.medians_us) - 1 for median in run.medians_us]
            for run in self.runs
        ]
        return tuple(statistics.median(column) for column in zip(*relative, strict=True))

    @property
    def spread(self) -> float:
        """Range of the runs' medians over their median; paired comparisons cancel this spread."""
        levels = [statistics.median(run.medians_us) for run in self.runs]
        return (max(levels) - min(levels)) / statistics.median(levels)


@dataclass(frozen=True, slots=True)
class TunedWinner:
    """The winner of one independent tune.

    Attributes:
        seed: The seed of the tune's proposals and inputs.
        config: Label of the winner.
        digest: Digest of the winner's config.
        trial_us: Time of the winner's trial during the search.
        final_us: Time of the winner in the tune's finals.
        regret: Time of the winner over the time of the best winner of all tunes, minus 1, in the
            common comparison.
    """

    seed: int
    config: str
    digest: str
    trial_us: float
    final_us: float
    regret: Interval

    @property
    def final_over_trial(self) -> float:
        """Relative difference of `final_us` and `trial_us`."""
        return self.final_us / self.trial_us - 1


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """The emitted library's function compared with the kernel that it should run.

    Attributes:
        kernel_us: Median of the first tune's winner in the common final.
        library_us: Median of `kgen_ops.<operator>(...)` in the same final.
        difference: Paired difference of the call's and the kernel's time.
        kernel_over_final: The kernel's time here over its time in the tune's finals, minus 1.
        protocol: How the call was timed.
    """

    kernel_us: float
    library_us: float
    difference: Interval
    kernel_over_final: float
    protocol: str


@dataclass(frozen=True, slots=True)
class ProblemQuality:
    """All results of one problem."""

    pass_name: str
    problem: str
    same: SameKernel
    winners: tuple[TunedWinner, ...]
    library: LibraryCall

    @property
    def flip_rate(self) -> float | None:
        """Share of pairs of tunes that chose different configs; None for a single tune."""
        pairs = list(combinations([w.digest for w in self.winners], 2))
        return sum(a != b for a, b in pairs) / len(pairs) if pairs else None

    @property
    def regrets(self) -> list[float]:
        """Regret of each tune's winner."""
        return [winner.regret.median for winner in self.winners]


@dataclass(frozen=True, slots=True)
class Quality:
    """The results of one `kgen measure-check`."""

    operator: str
    gpu: str
    l2: str
    environment: Mapping[str, str]
    tunes: int
    runs: int
    problems: tuple[ProblemQuality, ...]
