"""The part of a feasible set from which one of several processes proposes.

Processes that have seen the same results propose the same configs, and all but one have to give
them up. When each of two processes drew at random from the 48 best proposals, choosing these took
most of their time, and together they made no more trials per second than one process
(docs/decisions/0060). So each process has its own part, and all parts have the same size. With more
than 16 processes, some share a part and draw from it at random.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_PARTS = 16
# Most proposals from which all processes together draw. On a recorded space the median config drawn
# from 512 took 1.36 times the optimum, from 2000 1.96 times (a random config 2.43). 512 suffice,
# because most of a thousand processes wait for a trial at any time.
WIDEST = 512


class Share(NamedTuple):
    """A process's part of a feasible set.

    Attributes:
        place: Index of the part, from 0.
        parts: Number of parts.
        spread: Number of the part's best proposals from which the process draws at random.
    """

    place: int = 0
    parts: int = 1
    spread: int = 1

    def members(self, size: int) -> NDArray[np.bool_]:
        """Mask of the positions, in a feasible set of some size, that belong to the part.

        Neighbouring positions differ in one parameter. A hash distributes them over the parts, so
        that each part has all values of each parameter.
        """
        hashes = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        parts = (hashes >> np.uint64(40)) % np.uint64(self.parts)
        found: NDArray[np.bool_] = parts == self.place
        return found


WHOLE = Share()


def share_of(place: int, processes: int, ahead: int) -> Share:
    """Return the share of a process.

    Args:
        place: Index of the process among those that work on the study, from 0.
        processes: Number of those processes.
        ahead: Number of proposals that each may hold.
    """
    parts = min(processes, MOST_PARTS)
    mates = ceil(processes / parts)
    spread = 1 if mates == 1 else min(mates * ahead, WIDEST // parts)
    return Share(place % parts, parts, spread)
