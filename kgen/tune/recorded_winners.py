"""The winners of other problems, in the journals of earlier tunes.

They are tried first on a new problem, never adopted. Over the 82 tuned problems of the committed
H200 journals, each left out in turn, the first config within 2 % of the best came after 6.0 trials
with them and 8.0 without (`benchmarks/warm_start_replay.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kgen.model.config import Config
from kgen.model.record import Fate, Record

MOST = 3  # nearest problems whose winners are tried; trying the winners of all was no better
LEAST = 20  # timed configs that make a problem a searched one; certificates try one config on many
_OTHER = 4.0  # distance between two dtypes or options; for extents it is log2 of their ratio


def recorded_winners(records: Iterable[Record], pass_name: str, problem: str) -> list[Config]:
    """The fastest verified configs of other problems, those of the nearest problem first.

    Args:
        records: Records of one operator, of any pass, problem and GPU.
        pass_name: The pass to be tuned.
        problem: The problem to be tuned; its own records are ignored.
    """
    times: dict[tuple[str, str], dict[Config, float]] = {}
    for record in records:
        if record.pass_name != pass_name or record.problem == problem:
            continue
        if record.fate is not Fate.VERIFIED or record.timing is None:
            continue
        times.setdefault((record.problem, record.gpu), {})[record.config] = record.timing.median_us
    searched = [key for key, found in times.items() if len(found) >= LEAST]
    searched.sort(key=lambda key: (distance(key[0], problem), key))
    winners = (min(times[key], key=times[key].__getitem__) for key in searched)
    return list(dict.fromkeys(winners))[:MOST]


def distance(one: str, other: str) -> float:
    """The difference of two problems: 1 for each factor of two in an extent, 4 for an option."""
    mine, theirs = (dict(part.partition("=")[::2] for part in p.split(",")) for p in (one, other))
    total = 0.0
    for name in mine.keys() | theirs.keys():
        a, b = mine.get(name, ""), theirs.get(name, "")
        if a.isdigit() and b.isdigit():
            total += abs(math.log2(max(1, int(a)) / max(1, int(b))))
        elif a != b:
            total += _OTHER
    return total
