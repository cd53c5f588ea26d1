"""Which comparisons count as untested branches."""

from __future__ import annotations

from collections import Counter

import pytest

from kgen.catalogue import open_catalogue
from kgen.model.spread_source import pieces
from kgen.trial.untested import UntestedBranch, _is_one_sided, _operators, untested_fault

LESS, EQUAL, GREATER, NAN = 1, 2, 4, 8


@pytest.mark.parametrize(
    ("outcomes", "operators", "one_sided"),
    [
        (LESS | GREATER, ["=="], True),
        (LESS | GREATER | NAN, ["!="], True),
        (EQUAL, ["=="], True),
        (EQUAL | GREATER, ["=="], False),
        (LESS | GREATER, ["<"], False),
        (LESS | EQUAL, ["<="], False),  # of `a < b` as well, and that has two results
        (LESS, [">"], True),
        (LESS | NAN, [">"], True),
        (NAN, ["<"], True),
        (LESS | GREATER, ["==", "<"], False),  # one of the two
        (LESS, ["==", "<"], True),
        (LESS, [], True),
        (LESS | GREATER, [], False),
    ],
)
def test_outcomes(outcomes: int, operators: list[str], one_sided: bool) -> None:
    assert _is_one_sided(outcomes, operators) == one_sided


@pytest.mark.parametrize(
    ("source", "text", "operators"),
    [
        ("if (a<b && f<T>(c) == d) x();", "if (a<b", ["<"]),
        ("if (a<b && f<T>(c) == d) x();", "== d)", ["=="]),
        ("y = as<u32>(x) != 1;", "!= 1;", ["!="]),
        ("y = x->z << 2;", "y = x->z << 2;", []),
        ("y = a >= b;", "y = a >= b;", [">="]),
    ],
)
def test_operators_of_a_line(source: str, text: str, operators: list[str]) -> None:
    spread_lines = pieces(source)
    line = next(n for n, piece in enumerate(spread_lines, 1) if piece.text.strip() == text)
    assert _operators(spread_lines, line, Counter([line])) == operators


def test_a_line_with_more_comparisons_than_operators_has_those_of_other_lines() -> None:
    spread_lines = pieces("y = a % 64 == 63 && h > 3 ? 0 : 1; if (z < 4) y = 2;")
    line = next(n for n, piece in enumerate(spread_lines, 1) if "h > 3" in piece.text)
    assert _operators(spread_lines, line, Counter([line, line])) == [">", "=="]
    first = next(n for n, piece in enumerate(spread_lines, 1) if "63" in piece.text)
    assert _operators(spread_lines, line, Counter([line, line, first])) == [">"]


def test_a_named_condition_may_be_spaced_as_it_likes() -> None:
    variant = open_catalogue().entry("rmsnorm").space.variant("forward", "unaligned_rows")
    branch = UntestedBranch(7, "load_row( held, x+row * x_stride_M, row < M, own);")
    assert untested_fault([branch], variant) == ""
    other = UntestedBranch(9, "if (row < M)")
    assert "line 9: if (row < M)" in untested_fault([branch, other], variant)
