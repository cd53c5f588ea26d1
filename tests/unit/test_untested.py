"""Which comparisons count as untested branches."""

from __future__ import annotations

from collections import Counter

import pytest

from kgen.catalogue import open_catalogue
from kgen.model.spread_source import pieces
from kgen.model.whole_source import origins
from kgen.trial.untested import (
    UntestedBranch,
    _has_reason,
    _is_one_sided,
    _Made,
    _one_sided,
    _operators,
    _that_depend_on_calls,
    _use_of,
    untested_fault,
)

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
        (LESS | GREATER, ["switch"], True),
        (LESS | EQUAL, ["switch"], False),
        (EQUAL, ["__builtin_isnan"], True),
        (EQUAL | NAN, ["__builtin_isnan"], False),
        (LESS | NAN, ["__builtin_isfinite"], False),
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
        ("switch (a % 3) { case 1: x(); }", "switch (a % 3)", ["switch"]),
        ("if (__builtin_isnan(a)) x();", "if (__builtin_isnan(", ["__builtin_isnan"]),
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


@pytest.mark.parametrize(
    ("calls", "other_calls", "depends"),
    [
        ((1, 30), (), True),  # made by one call of 30
        ((1, 9), (), False),  # of a large problem, which has few calls
        ((2, 30), (), False),  # with the same ranges in both
        ((1, 30), (1,), True),
        ((1, 30), (2,), False),  # another instantiation, in two calls, had the same ranges
    ],
)
def test_a_comparison_of_one_call(
    calls: tuple[int, int], other_calls: tuple[int, ...], depends: bool
) -> None:
    spread_lines = pieces("if (a < 1) x(); if (b < 1) y();")
    first, second = (
        next(n for n, piece in enumerate(spread_lines, 1) if text in piece.text)
        for text in ("a < 1", "b < 1")
    )
    sites = [(100, first), (200, second), *((300 + i, first) for i in range(len(other_calls)))]
    made = {
        100: _Made(LESS, calls[0], varies=0, is_no_bound=1),
        200: _Made(LESS, calls[1], varies=0, is_no_bound=1),
        **{300 + i: _Made(LESS, n, varies=0, is_no_bound=1) for i, n in enumerate(other_calls)},
    }
    assert ((100, first) in _that_depend_on_calls(sites, made, spread_lines)) == depends


def test_what_varies_depends_on_the_call_unless_it_is_a_bound() -> None:
    spread_lines = pieces("if (a < 1) x();")
    for is_no_bound in (0, 1):
        made = {100: _Made(LESS, 5, varies=1, is_no_bound=is_no_bound)}
        assert bool(_that_depend_on_calls([(100, 1)], made, spread_lines)) == bool(is_no_bound)


def test_a_named_condition_may_be_spaced_as_it_likes() -> None:
    variant = open_catalogue().entry("rmsnorm").space.variant("forward", "unaligned_rows")
    branch = UntestedBranch(7, "load_row( held, x+row * x_stride_M, row < M, own);")
    assert untested_fault([branch], variant) == ""
    other = UntestedBranch(9, "if (row < M)")
    assert "line 9: if (row < M)" in untested_fault([branch, other], variant)


@pytest.mark.parametrize(
    ("source", "has_reason"),
    [
        ("if (a < 3) x();", False),
        ("if (a < 3) x();  // untested: a is 4", True),
        ("// untested: a is 4\nif (a < 3) x();", True),
        ("if (b &&\n    a < 3)  // untested: a is 4\n    x();", True),
        ("// untested: a is 4\n\nif (a < 3) x();", False),  # of another line
        ("y();  // untested: a is 4\nif (a < 3) x();", False),  # of the statement before
        ("// Of a:\n// untested: it is\n// 4\nif (a < 3) x();", True),
        ("// untested:\nif (a < 3) x();", False),
        ("if (a < 3)\n    x();  // untested: a is 4", False),  # the statement ends before it
    ],
)
def test_a_comment_gives_the_reason(source: str, has_reason: bool) -> None:
    spread_lines = pieces(source)
    line = next(n for n, piece in enumerate(spread_lines, 1) if "a < 3" in piece.text)
    assert _has_reason(source.split("\n"), spread_lines, line) == has_reason


@pytest.mark.parametrize(
    ("second", "one_sided"),
    [
        ("y = rises ? b : y;", False),  # copies of one comparison, of which the first met one side
        ("y = falls ? b : y;", True),
        ("if (t == 7 || rises) y = b;", True),  # has an operator of its own
    ],
)
def test_copies_of_a_comparison_count_together(second: str, one_sided: bool) -> None:
    source = f"bool rises = f(a);\nx = rises ? b : x;\n{second}"
    spread_lines = pieces(source)
    first, other = (
        next(n for n, p in enumerate(spread_lines, 1) if p.text.strip().startswith(text))
        for text in ("x = rises ?", second.split("?")[0].split("||")[0].strip())
    )
    made = {
        100: _Made(GREATER, 5, varies=1, is_no_bound=1),
        200: _Made(LESS | EQUAL, 5, varies=1, is_no_bound=1),
    }
    sites = [(100, first), (200, other)]
    assert _one_sided(sites, made, spread_lines, origins(source))[first] == [one_sided]


def test_lines_without_a_name_are_no_copies() -> None:
    spread_lines = pieces("f(1\n);\nf(2\n);")
    lines = [n for n, piece in enumerate(spread_lines, 1) if piece.text.strip() == ")"]
    origin_of = origins("f(1\n);\nf(2\n);")
    assert len({_use_of(spread_lines, line, origin_of) for line in lines}) == len(lines) == 2
