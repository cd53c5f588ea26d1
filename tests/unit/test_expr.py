"""The expression language of search spaces."""

from __future__ import annotations

import pickle

import pytest

from kgen.errors import ExprError
from kgen.model.expr import parse_expr

ENV = {"M": 8191, "vec": 4, "itemsize": 2, "dtype": "bf16", "flag": True}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ceil_div(M, vec)", 2048),
        ("round_up(M, 8) - M", 1),
        ("next_pow2(M) // 2 == 4096", True),
        ("is_pow2(vec) and not is_pow2(M)", True),
        ("vec * itemsize <= 16 and M % vec != 0", True),
        ("1 < vec <= 4 < M", True),
        ("dtype in ('bf16', 'fp16')", True),
        ("dtype not in ('fp32',)", True),
        ("vec if flag else -vec", 4),
        ("min(M, vec, 3) + max(1, 2)", 5),
        ("2 ** 10", 1024),
        ("flag or missing", True),  # as in Python, the right side is not looked at
    ],
)
def test_value(text: str, value: object) -> None:
    assert parse_expr(text)(ENV) == value
    # The generated library prints `text` as Python; it must mean the same there.
    assert parse_expr(parse_expr(text).text)(ENV) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "M.real",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "M / 2",
        "f'{M}'",
        "M[0]",
        "open('x')",
        "vec :=",
        "ceil_div",
        "ceil_div(a=1, b=2)",
    ],
)
def test_refuses_everything_else(text: str) -> None:
    with pytest.raises(ExprError):
        parse_expr(text)


def test_names_are_free_names_without_functions() -> None:
    assert parse_expr("ceil_div(M, rows * warps) + 1").names == {"M", "rows", "warps"}


@pytest.mark.parametrize(
    ("text", "part"),
    [("M // (vec - 4)", "zero"), ("unknown + 1", "unknown"), ("9 ** 9 ** 9", "beyond 64")],
)
def test_impossible_values_are_named(text: str, part: str) -> None:
    with pytest.raises(ExprError, match=part):
        parse_expr(text)(ENV)


def test_pickles_and_compares_by_text() -> None:
    expr = parse_expr("M+1")
    again = pickle.loads(pickle.dumps(expr))
    assert again == expr == parse_expr("M + 1")
    assert again(ENV) == 8192
