"""The part of a feasible set from which one of several processes proposes.

Processes that have seen the same results propose the same configs, and all but one have to give
them up. Where each of two drew at random from the 48 best proposals of both, to choose these took
most of their time, and they made no more trials a second than one (docs/decisions/0060). So each
process has a part of its own, as large as those of the others. Beyond 16 processes some share one,
and draw from it.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_PARTS = 16
# Proposals that all processes together draw from, at most. On a recorded space the median config
# drawn from 512 took 1.36 times the optimum, from 2000 1.96 times (a random config 2.43), and most
# of a thousand processes wait for a trial at any time.
WIDEST = 512


class Share(NamedTuple):
    """A process's part of a feasible set.

    Attributes:
        place: Which part, from 0.
        parts: Number of parts.
        spread: The process takes its proposals at random from so many best ones of the part.
    """

    place: int = 0
    parts: int = 1
    spread: int = 1

    def members(self, size: int) -> NDArray[np.bool_]:
        """Whether each position of a feasible set of some size is in the part.

        Neighbouring positions differ in one parameter, so they are dealt out by a hash: a part has
        all values of each parameter.
        """
        hashes = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        parts = (hashes >> np.uint64(40)) % np.uint64(self.parts)
        found: NDArray[np.bool_] = parts == self.place
        return found


WHOLE = Share()


def share_of(place: int, processes: int, ahead: int) -> Share:
    """Return the share of a process.

    Args:
        place: Its place among the processes that work on the study, from 0.
        processes: Number of those processes.
        ahead: Proposals that each may hold.
    """
    parts = min(processes, MOST_PARTS)
    mates = ceil(processes / parts)
    spread = 1 if mates == 1 else min(mates * ahead, WIDEST // parts)
    return Share(place % parts, parts, spread)
