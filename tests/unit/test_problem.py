"""Problems, dtypes and signatures."""

from __future__ import annotations

from itertools import combinations

import pytest

from kgen.errors import ProblemError
from kgen.model.problem import parse_problem
from kgen.model.signature import Dim, DTypeField, Pass, Signature, Tensor
from kgen.operators.rmsnorm import SIGNATURE


def test_round_trip_and_defaults() -> None:
    problem = parse_problem("N=4096, M=8192,dtype=bf16", SIGNATURE)
    assert str(problem) == (
        "M=8192,N=4096,dtype=bf16,w_dtype=bf16,residual_dtype=none,rstd_dtype=none"
    )
    assert parse_problem(str(problem), SIGNATURE) == problem
    assert problem.names == {
        "M": 8192,
        "N": 4096,
        "dtype": "bf16",
        "w_dtype": "bf16",
        "residual_dtype": "none",
        "rstd_dtype": "none",
        "itemsize": 2,
        "w_itemsize": 2,
        "residual_itemsize": 0,
        "rstd_itemsize": 0,
    }


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("M=1,K=2,dtype=fp32", "unknown name 'K'"),
        ("M=1,dtype=fp32", "'N' .columns. is missing"),
        ("M=1,N=0,dtype=fp32", "N=0 is not a whole number >= 1"),
        ("M=-1,N=1,dtype=fp32", "M=-1"),
        ("M=1.5,N=1,dtype=fp32", "M=1.5"),
        ("M=1_000,N=1,dtype=fp32", "M=1_000 is not a whole number >= 0 of at most 18 digits"),
        (f"M={'9' * 400},N=1,dtype=fp32", r"M=9+\.\.\. is not a whole number"),
        ("M=\N{ARABIC-INDIC DIGIT THREE},N=1,dtype=fp32", "is not a whole number"),
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
    found = SIGNATURE.dtype_combinations()
    pairs = dict.fromkeys((c["dtype"], c["w_dtype"]) for c in found)
    assert list(pairs) == [
        ("fp32", "fp32"),
        ("fp32", "none"),
        ("fp16", "fp16"),
        ("fp16", "fp32"),
        ("fp16", "none"),
        ("bf16", "bf16"),
        ("bf16", "fp32"),
        ("bf16", "none"),
    ]
    assert len(found) == 4 * len(pairs)  # with and without a residual, and a saved rstd


def test_few_combinations_show_every_pair() -> None:
    chosen = SIGNATURE.dtype_pairs()
    assert len(chosen) < len(SIGNATURE.dtype_combinations()) / 2
    for first, second in combinations([f.name for f in SIGNATURE.dtypes], 2):
        everything = {(c[first], c[second]) for c in SIGNATURE.dtype_combinations()}
        assert {(c[first], c[second]) for c in chosen} == everything


def test_a_problem_leaves_tensors_out() -> None:
    forward, backward = SIGNATURE.passes
    bare = parse_problem("M=2,N=3,dtype=bf16,w_dtype=none", SIGNATURE)
    assert [t.name for t in bare.present(forward).tensors] == ["x", "y"]
    assert [t.name for t in bare.present(backward).tensors] == ["dy", "x", "dx"]
    assert bare.names["w_itemsize"] == 0
    full = parse_problem("M=2,N=3,dtype=bf16,residual_dtype=bf16,rstd_dtype=fp32", SIGNATURE)
    assert full.present(forward) == forward
    assert full.names["residual_itemsize"] == 2


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (Tensor("x", ("M", "Q")), "tensor 'x' of forward has unknown dim 'Q'"),
        (Tensor("x", ("M",), dtype="dytpe"), "tensor 'x' of forward has unknown dtype 'dytpe'"),
        (Tensor("x", ("M",), free_strides=("N",)), "has no dim 'N' whose stride is free"),
    ],
)
def test_a_signature_declares_what_its_tensors_have(tensor: Tensor, why: str) -> None:
    with pytest.raises(ProblemError, match=why):
        Signature(
            dims=(Dim("M", "rows"), Dim("N", "columns")),
            dtypes=(DTypeField("dtype", ("fp32",), default="fp32"),),
            passes=(Pass("forward", inputs=(tensor,), outputs=(Tensor("y", ("M",)),)),),
        )


def test_a_dim_that_does_not_exist_is_named() -> None:
    problem = parse_problem("M=8,N=16,dtype=fp32", SIGNATURE)
    assert problem.shape(("M", "N + 1")) == (8, 17)
    for ask in (lambda: problem.dim("Q"), lambda: problem.shape(("M", "Q + 1"))):
        with pytest.raises(ProblemError, match=r"M=8,N=16.*has no dim 'Q'\n  known: M, N"):
            ask()
