"""What `kgen measure-check` finds, and the numbers that follow from it. Shares, not per cent."""

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
        seed: Of the inputs and of the orders.
        medians_us: Per contender, in the order in which they were prepared.
        protocols: Per contender, how it was timed.
        differences: Paired difference of the first two contenders, of the next two, and so on:
            pairs that share no contender are independent.
        clocks: State of the GPU afterwards; empty where it cannot be read.
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
        """Per contender, how far it lies from the mean of its run: the median over runs.

        Noise changes sign from run to run; what stays with a contender's place is a fault of the
        protocol.
        """
        relative = [
            [median / statistics.mean(run.medians_us) - 1 for median in run.medians_us]
            for run in self.runs
        ]
        return tuple(statistics.median(column) for column in zip(*relative, strict=True))

    @property
    def spread(self) -> float:
        """Largest less smallest median of a run, over their median: what pairing cancels."""
        levels = [statistics.median(run.medians_us) for run in self.runs]
        return (max(levels) - min(levels)) / statistics.median(levels)


@dataclass(frozen=True, slots=True)
class TunedWinner:
    """What one independent tune chose.

    Attributes:
        seed: Of its proposals and inputs.
        config: Label of the winner.
        digest: Digest of its config.
        trial_us: Time that its trial gave during the search.
        final_us: Time that the tune's final gave.
        regret: Time over that of the best of all winners, less 1, in the common final.
    """

    seed: int
    config: str
    digest: str
    trial_us: float
    final_us: float
    regret: Interval

    @property
    def final_over_trial(self) -> float:
        """Relative difference of the final's time to the trial's."""
        return self.final_us / self.trial_us - 1


@dataclass(frozen=True, slots=True)
class LibraryCall:
    """The emitted library's function beside the kernel that it should run.

    Attributes:
        kernel_us: Median of the first tune's winner in the common final.
        library_us: Median of `kgen_ops.<operator>(...)` there.
        difference: Paired: how much longer the call takes than the kernel.
        kernel_over_final: The kernel's time here relative to its tune's final, less 1.
        protocol: How the call was timed.
    """

    kernel_us: float
    library_us: float
    difference: Interval
    kernel_over_final: float
    protocol: str


@dataclass(frozen=True, slots=True)
class ProblemQuality:
    """All findings of one problem."""

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
    """The findings of one `kgen measure-check`."""

    operator: str
    gpu: str
    l2: str
    environment: Mapping[str, str]
    tunes: int
    runs: int
    problems: tuple[ProblemQuality, ...]
