"""Covering arrays: few rows that together have every pair of values that occurs in many rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

_SINGLE = 100  # a value that no chosen row has yet counts as many pairs


def pairs_of(row: Mapping[str, Hashable]) -> set[tuple[tuple[str, Hashable], ...]]:
    """Every pair of a row's values, each with the name of its factor; and each value alone."""
    values = list(row.items())
    return {*combinations(values, 2), *((value,) for value in values)}


def covering_rows(rows: Sequence[Mapping[str, Hashable]], at_most: int | None = None) -> list[int]:
    """Choose rows that have every pair of values that occurs in any of `rows`.

    Greedy: the next row is the one with the most pairs that the chosen ones lack; a single value
    that they lack counts as `_SINGLE` pairs, so that a short choice has every value before it has
    many pairs.

    Args:
        rows: The candidates, a mapping from factor to value each; all with the same factors, in
            the same order.
        at_most: Stop after so many rows.
    Returns:
        Indices into `rows`, in the order of choice.
    """
    import numpy as np

    pairs = [pairs_of(row) for row in rows]
    number = {pair: i for i, pair in enumerate(dict.fromkeys(p for row in pairs for p in row))}
    has = np.zeros((len(rows), len(number)), dtype=np.float32)
    for index, row in enumerate(pairs):
        has[index, [number[pair] for pair in row]] = 1.0
    missing = np.array([_SINGLE if len(pair) == 1 else 1 for pair in number], dtype=np.float32)
    chosen: list[int] = []
    while missing.any() and (at_most is None or len(chosen) < at_most):
        best = int(np.argmax(has @ missing))
        chosen.append(best)
        missing[has[best] > 0] = 0.0
    return chosen
