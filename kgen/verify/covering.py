"""Covering arrays: few of many rows that together contain every pair of values of all rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

_SINGLE = 100  # a single value that no chosen row has yet counts as this many pairs


def pairs_of(row: Mapping[str, Hashable]) -> set[tuple[tuple[str, Hashable], ...]]:
    """All pairs of a row's (factor, value) items, and each item alone."""
    values = list(row.items())
    return {*combinations(values, 2), *((value,) for value in values)}


def covering_rows(rows: Sequence[Mapping[str, Hashable]], at_most: int | None = None) -> list[int]:
    """Choose rows that together contain every pair of values that occurs in any of `rows`.

    The choice is greedy: the next row is the one with the most pairs that no chosen row has. A
    single value that no chosen row has counts as `_SINGLE` pairs, so that a small `at_most` yields
    all values before many pairs.

    Args:
        rows: The candidates: mappings from factor to value, all with the same factors in the same
            order.
        at_most: Largest number of rows; None: no limit.
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
