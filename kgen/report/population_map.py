"""The map of a population in the HTML report: step and ratio of each problem.

`kgen.coverage`, which imports this package, measures the map and fills these dataclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MappedProblem:
    """One cell of a map.

    Attributes:
        pass_name: `forward` or `backward`.
        name: Short name of the problem.
        step: Dispatch step that serves the problem.
        config: The config that serves the problem; empty if there is none.
        us: Median time of the kernel, microseconds; None if the kernel was not timed.
        floor: Least possible time, microseconds.
        peer: The fastest peer; empty if no peer was timed.
        peer_us: Median time of the peer in the same run.
        ratio: Time of the peer over the time of the kernel.
        loss: Time of the kernel over the time of the best config of a search, minus 1.
        failed: Why there is no time.
    """

    pass_name: str
    name: str
    step: str
    config: str
    us: float | None
    floor: float | None
    peer: str
    peer_us: float | None
    ratio: float | None
    loss: float | None
    failed: str


@dataclass(frozen=True)
class PopulationMap:
    """The map of one operator on one GPU.

    Attributes:
        operator: Operator name.
        gpu: Profile name.
        populations: Names of the populations.
        problems: Cells in the order of the populations.
        summary: The table of `kgen coverage`, as text.
    """

    operator: str
    gpu: str
    populations: Sequence[str]
    problems: Sequence[MappedProblem]
    summary: str


def map_data(shown: PopulationMap) -> dict[str, Any]:
    """A map as plain data; the short name of a problem gives the row and column of its cell."""
    return {
        "op": shown.operator,
        "gpu": shown.gpu,
        "populations": list(shown.populations),
        "passes": list(dict.fromkeys(p.pass_name for p in shown.problems)),
        "summary": shown.summary,
        "cells": [
            {**asdict(p), **shape_and_kind(p.name)} for p in shown.problems
        ],
    }


def shape_and_kind(label: str) -> dict[str, str]:
    """Split a short name into shape (row of a map) and the rest, such as dtypes (column)."""
    words = label.split()
    first = next((i for i, w in enumerate(words) if not w[-1:].isdigit() or w[:1].islower()),
                 len(words))
    return {"shape": " ".join(words[:first]), "kind": " ".join(words[first:])}
