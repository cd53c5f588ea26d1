"""Joins the outcomes of a host run's parts into the outcome that a single process would have.

Each part runs some of the run's input sets, with all orders of threads, in its own process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kgen.errors import VerifyError, WorkerError
from kgen.model.record import Fate, Tried
from kgen.model.set_results import joined
from kgen.trial.handle import printing_refused
from kgen.worker.messages import TrialOutcome

_FAULTS = (Fate.WRONG, Fate.CRASHED, Fate.REJECTED)


@dataclass(frozen=True, slots=True)
class PartEnd:
    """How a part ended.

    Attributes:
        outcome: The outcome of the part's trial, or the error that was raised instead.
        place: Index of the input set that the part began last; None if it began none.
    """

    outcome: TrialOutcome | WorkerError | VerifyError
    place: int | None

    @property
    def is_fault(self) -> bool:
        """Whether the part found the kernel at fault."""
        return isinstance(self.outcome, TrialOutcome) and self.outcome.fate in _FAULTS

    @property
    def is_end(self) -> bool:
        """Whether the part ran all of its sets, and the kernel passed on each."""
        return isinstance(self.outcome, TrialOutcome) and self.outcome.fate is Fate.VERIFIED


def joined_outcome(ends: Sequence[PartEnd]) -> TrialOutcome:
    """The outcome of a run, from the ends of all its parts.

    If several parts found a fault, the first one in the order of the run counts. A fault takes
    precedence over a part that timed out or had no worker, because it proves the kernel wrong.

    Raises:
        VerifyError, WorkerError: The error of a part, if no part found a fault.
    """
    stops = [end for end in ends if not end.is_end]
    if stops:
        first = min(stops, key=lambda end: (
            not end.is_fault, math.inf if end.place is None else end.place))
        if not isinstance(first.outcome, TrialOutcome):
            raise first.outcome
        if first.outcome.sets is None:
            return first.outcome
    outcomes = [end.outcome for end in ends if isinstance(end.outcome, TrialOutcome)]
    tried = [one for one in outcomes if one.sets is not None]
    results = joined(one.sets for one in tried if one.sets is not None)
    printed = sum(one.printed for one in outcomes)
    if printed and not results.reason:
        return printing_refused(printed, next(o.printed_head for o in outcomes if o.printed))
    evidence = tried[0].evidence
    assert evidence is not None
    return TrialOutcome(
        Fate.WRONG if results.reason else Fate.VERIFIED,
        results.reason,
        accuracy=results.accuracy,
        evidence=replace(
            evidence,
            tried=tuple(Tried(one.label, one.seed) for one in results.tried),
            skipped=results.skipped,
        ),
    )
