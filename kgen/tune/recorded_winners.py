"""The winners of other problems, in the journals of earlier tunes.

They are tried first on a new problem, never adopted. A tune for another folder also tries winners
of the committed library, which may have had the same problem. Over the 82 tuned problems of the
committed H200 journals, each left out in turn, the first config within 2 % of the best came after
6.0 trials with them and 8.0 without (`benchmarks/warm_start_replay.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kgen.journal import Journal
from kgen.model.config import Config
from kgen.model.record import Fate, Record

MOST = 3  # nearest problems whose winners are tried; trying the winners of all was no better
LEAST = 20  # timed configs that make a problem a searched one; certificates try one config on many
_OTHER = 4.0  # distance between two dtypes or options; for extents it is log2 of their ratio


@dataclass(frozen=True, slots=True)
class EarlierRecords:
    """The timed records of one pass that a tune finds when it begins, of all GPUs.

    Attributes:
        own: Those in the folder that the tune writes to.
        elsewhere: Those in other folders.
    """

    pass_name: str
    own: tuple[Record, ...]
    elsewhere: tuple[Record, ...]

    @classmethod
    def read(cls, pass_name: str, own: Path, others: Iterable[Path]) -> EarlierRecords:
        """Read the journals of the folder that the tune writes to, and of other folders.

        Raises:
            StorageError, RecordError: As in `Journal.read`.
        """
        unlike = dict.fromkeys(folder for folder in others if folder.resolve() != own.resolve())
        return cls(pass_name, _timed([own], pass_name), _timed(unlike, pass_name))

    def winners(self, problem: str) -> list[Config]:
        """`recorded_winners` of a problem."""
        return recorded_winners(self.own, self.pass_name, problem, self.elsewhere)


def _timed(folders: Iterable[Path], pass_name: str) -> tuple[Record, ...]:
    return tuple(
        record
        for folder in folders
        for path in sorted(folder.glob("*.trials.jsonl"))
        for record in Journal(path).read()
        if record.pass_name == pass_name and record.timing is not None
    )


def recorded_winners(
    records: Iterable[Record], pass_name: str, problem: str, elsewhere: Iterable[Record] = ()
) -> list[Config]:
    """The fastest verified configs of other problems, those of the nearest problem first.

    Args:
        records: Records of one operator, of any pass, problem and GPU.
        pass_name: The pass to be tuned.
        problem: The problem to be tuned; its own records are ignored, because its search has them.
        elsewhere: The same of another folder, where the problem to be tuned is one of the others.
    """
    times: dict[tuple[str, str], dict[Config, float]] = {}
    for record in chain((r for r in records if r.problem != problem), elsewhere):
        if record.pass_name != pass_name:
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
