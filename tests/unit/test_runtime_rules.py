"""The steps of dispatch: what a rule covers, what it falls back on, how it is explained."""

from __future__ import annotations

from typing import Any

import pytest

from kgen.runtime.errors import DispatchError
from kgen.runtime.gpus import Table
from kgen.runtime.problems import Explanation
from kgen.runtime.ranking import Ranking
from kgen.runtime.rows import Call, DispatchRule, Family, Gpu, Row, SafeRow
from kgen.runtime.rules import covering, evidence_text, first_fitting, path_text
from kgen.runtime.selection import candidates
from kgen.runtime.signature import Argument, Dim, DTypeField, PassSignature

SIGNATURE = PassSignature(
    function="op",
    dims=(Dim("B"), Dim("H"), Dim("N")),
    dtypes=(DTypeField("dtype", ("fp32", "bf16")),),
    inputs=(Argument("x", ("B", "H", "N")),),
    outputs=(Argument("y", ("B", "H", "N")),),
)


def unused(*_: Any) -> Any:
    raise AssertionError("nothing is launched here")


def row(record: str, b: int, h: int, most: int = 10**9, dtype: str = "bf16") -> Row:
    """A row of N = 64 that serves at most so many batch rows."""
    return Row((b, h, 64), (dtype,), ("N",), "k", f"config_{record}", lambda c: most >= c.B, unused,
               record, 1.0)


def choose(call: Call) -> tuple[str, ...]:
    """As it is generated."""
    if call.B * call.H <= 64:
        if call.H <= 3:
            return ("few",)
        return ("small", "large")
    return ("large",)


class NoFallbacks:
    """A library without families and safe kernels."""

    def families(self) -> dict[str, Family]:
        return {}

    def safe_rows(self) -> tuple[SafeRow, ...]:
        return ()

    def ranking(self, gpu: Gpu) -> Ranking | None:
        return None


ROWS = (row("small", 1, 8, most=4), row("large", 64, 8), row("few", 2, 2))
RULE = DispatchRule(("bf16",), (("N", 64),), choose, 12, 0.0123, 0.05)


def choice(b: int, h: int, *, n: int = 64, dtype: str = "bf16",
           rules: tuple[DispatchRule, ...] = (RULE,), rows: tuple[Row, ...] = ROWS
           ) -> tuple[str, str] | None:
    """(step, record) of the row that dispatch chooses; None: no measured row."""
    table = Table(None, True, rows, rules, {})
    found = candidates(SIGNATURE, "op", table, NoFallbacks(), (b, h, n), (dtype,),
                       Call(B=b, H=h, N=n))
    try:
        first = next(found)
    except DispatchError:
        return None
    assert isinstance(first.row, Row)
    return (first.step, first.row.record)


def test_exact_goes_before_learnt_and_learnt_before_nearest() -> None:
    assert choice(1, 8) == ("exact", "small")
    assert choice(2, 2, rules=()) == ("exact", "few")
    assert choice(2, 8) == ("learnt", "small")
    assert choice(9, 8) == ("learnt", "large")
    assert choice(4, 16, rules=()) == ("nearest", "small")
    assert choice(5, 16) == ("learnt", "large")


def test_a_rule_serves_its_dtypes_and_constants_alone() -> None:
    assert choice(2, 8, dtype="fp32") is None
    assert choice(2, 8, n=65) is None
    plain = (*ROWS, row("plain", 4, 4, dtype="fp32"))
    assert choice(2, 8, dtype="fp32", rows=plain) == ("nearest", "plain")
    assert covering((RULE,), {"B": 1, "H": 1, "N": 65}, ("bf16",)) is None


def test_a_rule_serves_no_problem_far_from_those_it_was_learnt_from() -> None:
    within = RULE._replace(extents=(("B", 2, 9), ("H", 4, 16)))
    assert choice(9, 16, rules=(within,)) == ("learnt", "large")
    assert choice(2, 4, rules=(within,)) == ("learnt", "small")
    assert choice(13, 24, rules=(within,)) == ("learnt", "large")  # by less than a half
    for b, h in ((14, 16), (9, 25), (9, 2), (1, 16)):
        found = choice(b, h, rules=(within,))
        assert found is not None
        assert found[0] == "nearest"


def test_a_refused_row_gives_way_to_the_next_one() -> None:
    assert choice(5, 8) == ("learnt", "large")  # `small` serves four batch rows at most


def test_where_no_row_of_the_leaf_fits_the_nearest_serves() -> None:
    rows = (row("small", 1, 8), row("large", 64, 8), row("few", 2, 2, most=0))
    assert choice(3, 3, rows=rows) == ("nearest", "small")
    missing = tuple(r for r in ROWS if r.record != "few")
    assert choice(3, 3, rows=missing) == ("nearest", "small")
    assert first_fitting(RULE, missing, Call(B=3, H=3, N=64)) is None


@pytest.mark.parametrize(
    ("b", "h", "record", "text"),
    [
        (2, 2, "few", "B * H = 4 <= 64, H = 2 <= 3"),
        (2, 8, "small", "B * H = 16 <= 64, H = 8 > 3"),
        (5, 8, "large", "B * H = 40 <= 64, H = 8 > 3; choice 2: the conditions of earlier "
                        "choices do not hold"),
        (9, 8, "large", "B * H = 72 > 64"),
    ],
)
def test_the_path_is_that_of_the_rule(b: int, h: int, record: str, text: str) -> None:
    assert path_text(RULE, {"B": b, "H": h, "N": 64}, record) == text


def test_a_rule_without_comparisons_says_so() -> None:
    single = RULE._replace(choose=lambda call: ("large",))
    assert path_text(single, {"B": 1, "H": 1, "N": 64}, "large") == "one row for all"


def test_an_explanation_prints_path_and_evidence() -> None:
    told = Explanation("op", "B=2", "h200", True, "learnt", "c", "k", "measured", "B=1", "r", 1.0,
                       "B = 2 <= 4", evidence_text(RULE))
    assert "h200: learnt" in str(told)
    assert "  rule      B = 2 <= 4\n" in str(told)
    assert "12 problems, 1.2 % above the best" in str(told)
    assert "5.0 % at worst" in str(told)
