"""Rank finalists by paired comparison; break ties by fewer registers, then by smaller digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kgen.measure.stats import Contender, rank


@dataclass(frozen=True, slots=True)
class Entrant:
    """A finalist.

    Attributes:
        samples_us: Times of the interleaved run; the i-th samples of all entrants are of one round.
        registers: Registers per thread, the largest of the config's kernels; 0 on the host.
        digest: The digest of its config; differs between entrants.
    """

    samples_us: tuple[float, ...]
    registers: int
    digest: str


def pick(entrants: Sequence[Entrant]) -> list[int]:
    """Return the indices of the entrants, best first.

    Two runs, or two ranks of one job, with the same ties choose the same winner.
    """
    contenders = [Contender(str(i), e.registers, e.digest) for i, e in enumerate(entrants)]
    samples = {str(i): e.samples_us for i, e in enumerate(entrants)}
    return [int(name) for name in rank(contenders, samples)]
