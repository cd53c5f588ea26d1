"""Problems, dtypes and signatures."""

from __future__ import annotations

import pytest

from kgen.errors import ProblemError
from kgen.model.problem import parse_problem
from kgen.operators.rmsnorm import SIGNATURE


def test_round_trip_and_defaults() -> None:
    problem = parse_problem("N=4096, M=8192,dtype=bf16", SIGNATURE)
    assert str(problem) == "M=8192,N=4096,dtype=bf16,w_dtype=bf16"
    assert parse_problem(str(problem), SIGNATURE) == problem
    assert problem.names == {
        "M": 8192,
        "N": 4096,
        "dtype": "bf16",
        "w_dtype": "bf16",
        "itemsize": 2,
        "w_itemsize": 2,
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("M=1,K=2,dtype=fp32", "unknown name 'K'"),
        ("M=1,dtype=fp32", "'N' .columns. is missing"),
        ("M=1,N=0,dtype=fp32", "N=0 is not a whole number >= 1"),
        ("M=-1,N=1,dtype=fp32", "M=-1"),
        ("M=1.5,N=1,dtype=fp32", "M=1.5"),
        ("M=1,N=1", "'dtype' is missing"),
        ("M=1,N=1,dtype=bf61", "did you mean 'bf16'"),
        ("M=1,N=1,dtype=fp16,w_dtype=bf16", "'w_dtype=bf16' is not supported"),
        ("M=1,M=2,N=1,dtype=fp16", "'M' is given twice"),
        ("M,N=1,dtype=fp16", "is not name=value"),
        ("", "'M'"),
    ],
)
def test_mistakes_are_named(text: str, part: str) -> None:
    with pytest.raises(ProblemError, match=part):
        parse_problem(text, SIGNATURE)


def test_dtype_combinations_are_the_legal_ones() -> None:
    pairs = [tuple(c.values()) for c in SIGNATURE.dtype_combinations()]
    assert pairs == [
        ("fp32", "fp32"),
        ("fp16", "fp16"),
        ("fp16", "fp32"),
        ("bf16", "bf16"),
        ("bf16", "fp32"),
    ]
