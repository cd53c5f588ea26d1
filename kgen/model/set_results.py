"""Results of a verification run by input set, so that the parts of a split run can be joined.

A run may be split: each part tries some of the run's input sets in a process of its own. The
verdict follows from the results of all sets in the run's order, whichever process tried them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen.model.record import OutputAccuracy


@dataclass(frozen=True, slots=True)
class Part:
    """One of several parts of a run.

    Attributes:
        index: Index of this part, from 0.
        count: Number of parts.
    """

    index: int
    count: int


@dataclass(frozen=True, slots=True)
class SetResult:
    """The result of one input set.

    Attributes:
        place: Position of the set in the schedule of the whole run. Sets that replace a set that
            the guards refuse have the position of that set.
        label: Label of the set, as in a verdict.
        seed: Seed of the set.
        accuracy: Error of each output; empty if the set was skipped.
        fault: Why the kernel fails on this set; empty if it passes.
        skipped: Whether the set was not tried: the guards do not admit it, or there is no room.
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
        scheduled: Number of sets of the whole run.
        left_out: Labels of the sets that are too large for the run.
        sets: Results in the order of the run, up to the first set on which the kernel fails.
    """

    scheduled: int
    left_out: tuple[str, ...]
    sets: tuple[SetResult, ...]

    @property
    def fault(self) -> str:
        """Why the kernel fails on a set; empty if it passes all of them."""
        return self.sets[-1].fault if self.sets else ""

    @property
    def reason(self) -> str:
        """Why the run refuses the kernel: a fault, or that the guards admit none of the sets."""
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
        """Labels of the sets that were not tried."""
        return (*self.left_out, *(one.label for one in self.sets if one.skipped))

    @property
    def accuracy(self) -> tuple[OutputAccuracy, ...]:
        """Error of each output on the first set where error / bound is largest."""
        worst: dict[str, OutputAccuracy] = {}
        for one in self.sets:
            for accuracy in one.accuracy:
                known = worst.get(accuracy.output)
                if known is None or _share(accuracy) > _share(known):
                    worst[accuracy.output] = accuracy
        return tuple(worst.values())


def fresh_seed(seed: int, trials: int) -> int:
    """The seed of the fresh inputs of a trial whose request names no seed.

    Args:
        seed: Seed of the worker.
        trials: Number of trials of the same problem in the worker, this one included.
    """
    return seed * 1_000_003 + trials


def joined(parts: Iterable[SetResults]) -> SetResults:
    """Join the results of all parts of a run, as if one process had tried set after set.

    Args:
        parts: All parts. Each part ends at its own first fault; the first of these faults in the
            run's order is the fault of the run.
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
