"""Covering arrays contain every pair of values."""

from __future__ import annotations

import random

import pytest

from kgen.verify.covering import covering_rows, pairs_of

pytestmark = pytest.mark.quick


def rows(seed: int) -> list[dict[str, object]]:
    """Random rows of six factors, not all combinations of which occur."""
    draw = random.Random(seed)
    drawn = [
        {"a": draw.choice("xyz"), "b": draw.choice([True, False]), "c": draw.randrange(4),
         "d": draw.choice(["fp32", "bf16"]), "e": draw.randrange(3), "f": draw.randrange(2)}
        for _ in range(300)
    ]  # fmt: skip
    return [row for row in drawn if not (row["a"] == "x" and row["b"])]


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_that_occurs_is_chosen(seed: int) -> None:
    candidates = rows(seed)
    chosen = covering_rows(candidates)
    wanted = set().union(*map(pairs_of, candidates))
    assert set().union(*(pairs_of(candidates[i]) for i in chosen)) == wanted
    assert len(set(chosen)) == len(chosen) <= 24, "far more than the 12 of the largest two factors"


@pytest.mark.parametrize("seed", range(5))
def test_a_short_choice_has_every_value_first(seed: int) -> None:
    candidates = rows(seed)
    chosen = covering_rows(candidates, at_most=5)
    assert chosen == covering_rows(candidates)[:5]
    values = {item for row in candidates for item in row.items()}
    assert {item for i in chosen for item in candidates[i].items()} == values


def test_no_rows_and_one_row() -> None:
    assert covering_rows([]) == []
    assert covering_rows([{"a": 1}, {"a": 1}]) == [0]
