"""What came of the input sets of a run, so that the parts of a run can be put together again.

A run may be split: each part tries some of its sets, in a process of its own. What is said of the
run follows from the results of all sets in the run's order, whoever tried them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen.model.record import OutputAccuracy


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a run.

    Attributes:
        index: Which one, from 0.
        count: How many there are.
    """

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class SetResult:
    """What came of one input set.

    Attributes:
        place: Of the set in the schedule of the whole run. Sets that take the place of one that
            guards refuse have its place.
        label: Of the set, as in a verdict.
        seed: Of the set.
        accuracy: Per output; of no set that was skipped.
        fault: Why the set refuses the kernel; empty if it does not.
        skipped: Whether the set was not tried: guards do not admit it, or there is no room.
    """

    place: int
    label: str
    seed: int
    accuracy: tuple[OutputAccuracy, ...] = ()
    fault: str = ""
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class SetResults:
    """The results of a run or of a part of one.

    Attributes:
        scheduled: Sets that the whole run has.
        left_out: Labels of those that it has not, because they are too large.
        sets: In the order of the run, to the first that refuses the kernel.
    """

    scheduled: int
    left_out: tuple[str, ...]
    sets: tuple[SetResult, ...]

    @property
    def fault(self) -> str:
        """Why a set refuses the kernel; empty if none does."""
        return self.sets[-1].fault if self.sets else ""

    @property
    def reason(self) -> str:
        """Why the run refuses the kernel, of which no set may have been tried."""
        if any(not one.skipped for one in self.sets):
            return self.fault
        return (
            f"the variant's guards admit none of the {self.scheduled} input sets\n"
            f"  skipped: {', '.join(self.skipped)}"
        )

    @property
    def tried(self) -> tuple[SetResult, ...]:
        """The sets that were tried."""
        return tuple(one for one in self.sets if not one.skipped)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Labels of the sets that were not."""
        return (*self.left_out, *(one.label for one in self.sets if one.skipped))

    @property
    def accuracy(self) -> tuple[OutputAccuracy, ...]:
        """Per output, of the first set on which error / bound was largest."""
        worst: dict[str, OutputAccuracy] = {}
        for one in self.sets:
            for accuracy in one.accuracy:
                known = worst.get(accuracy.output)
                if known is None or _share(accuracy) > _share(known):
                    worst[accuracy.output] = accuracy
        return tuple(worst.values())


def fresh_seed(seed: int, trials: int) -> int:
    """The seed of a trial's own inputs that brings none.

    Args:
        seed: Of the worker.
        trials: Trials of the same problem in the worker, with this one.
    """
    return seed * 1_000_003 + trials


def joined(parts: Iterable[SetResults]) -> SetResults:
    """The results of a run from those of its parts, as if one process had tried set after set.

    Args:
        parts: All parts. Each has ended at its own first fault: the first of these is the run's.
    """
    parts = list(parts)
    sets: list[SetResult] = []
    for one in sorted((one for part in parts for one in part.sets), key=lambda one: one.place):
        sets.append(one)
        if one.fault:
            break
    return SetResults(parts[0].scheduled, parts[0].left_out, tuple(sets))


def _share(accuracy: OutputAccuracy) -> float:
    return accuracy.error / accuracy.bound
