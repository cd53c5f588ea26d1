"""The result of a verification."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.model.record import OutputAccuracy
from kgen.model.set_results import SetResults


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a kernel computed its operator on all input sets.

    Attributes:
        ok: Whether the kernel passed and may be timed.
        reason: Empty if ok, else one paragraph: the fault, the worst element, the inputs.
        level: The level of the verification.
        accuracy: Per output, the accuracy on the set where error / bound was largest. The error of
            a refused kernel may be inf.
        cases: Labels of the input sets that ran, in order; the last is the one that failed.
        seeds: Seeds of these sets.
        skipped: Labels of the input sets that the variant's guards do not admit, or that are too
            large for the host layer.
        results: The result of each set.
    """

    ok: bool
    reason: str
    level: str
    accuracy: tuple[OutputAccuracy, ...]
    cases: tuple[str, ...]
    seeds: tuple[int, ...]
    skipped: tuple[str, ...]
    results: SetResults


def verdict_from(results: SetResults, level: str, reason: str) -> Verdict:
    """Build the verdict from the results of the sets."""
    return Verdict(
        ok=not reason,
        reason=reason,
        level=level,
        accuracy=results.accuracy,
        cases=tuple(one.label for one in results.tried),
        seeds=tuple(one.seed for one in results.tried),
        skipped=results.skipped,
        results=results,
    )
