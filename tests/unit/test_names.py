"""Short names of problems: what they show, and that they say exactly one problem."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kgen.catalogue import open_catalogue
from kgen.errors import ProblemError
from kgen.model.names import parse_short_name, read_problem, short_name
from kgen.model.problem import Problem, parse_problem
from kgen.model.signature import Dim, DTypeField, Option, Pass, Signature, Tensor

JOURNALS = sorted((Path(__file__).parents[2] / "generated").glob("*/*/reports/*.jsonl"))
CATALOGUE = open_catalogue()


def named(operator: str, key: str) -> str:
    signature = CATALOGUE.operator(operator).signature
    return short_name(parse_problem(key, signature), signature)


@pytest.mark.parametrize(("operator", "key", "name"), [
    ("rmsnorm", "M=8192,N=4096,dtype=bf16", "M8192 N4096 bf16"),
    ("rmsnorm", "M=8192,N=4096,dtype=bf16,w_dtype=fp32,rstd_dtype=fp32",
     "M8192 N4096 bf16 w:fp32 +rstd"),
    ("rmsnorm", "M=1,N=2,dtype=fp16,w_dtype=none,residual_dtype=fp16",
     "M1 N2 fp16 -w +residual"),
    ("timex", "B=32,C=768,T=768,dtype=fp32", "B32 C768 T768 fp32"),
    ("wkv6", "B=8,T=4096,H=32,K=64,V=64,dtype=bf16", "B8 T4096 H32 D64 bf16"),
    ("wkv6",
     "B=8,T=4096,H=32,K=64,V=64,dtype=bf16,decay_form=raw,initial_state_dtype=fp32,"
     "final_state_dtype=fp32", "B8 T4096 H32 D64 bf16 raw +state"),
    ("wkv6", "B=1,N=3,T=99,H=2,K=64,V=32,dtype=fp16,w_dtype=fp16,cu_seqlens_dtype=int64,"
     "final_state_dtype=fp32", "B1 N3 T99 H2 K64 V32 fp16 w:fp16 +final_state +cu_seqlens:int64"),
    ("linear_attention", "B=8,H=16,T=4096,E=64,M=64,dtype=fp32,product_dtype=tf32",
     "B8 H16 T4096 D64 fp32 product:tf32"),
])
def test_a_name_shows_what_differs_from_the_defaults(operator: str, key: str, name: str) -> None:
    signature = CATALOGUE.operator(operator).signature
    assert named(operator, key) == name
    assert read_problem(name, signature) == read_problem(key, signature)


@pytest.mark.parametrize("journal", JOURNALS, ids=lambda p: p.parts[-3])
def test_every_committed_problem_has_its_own_name(journal: Path) -> None:
    signature = CATALOGUE.operator(journal.parts[-3]).signature
    lines = journal.read_text(encoding="utf-8").splitlines()
    problems = [parse_problem(key, signature) for key in {json.loads(x)["problem"] for x in lines}]
    names = {short_name(problem, signature): problem for problem in problems}
    assert len(names) == len(problems)
    assert all(parse_short_name(name, signature) == p for name, p in names.items())


@pytest.mark.parametrize("operator", CATALOGUE.names)
def test_every_choice_of_an_operator_is_read_back(operator: str) -> None:
    signature = CATALOGUE.operator(operator).signature
    names = set()
    combinations = signature.dtype_combinations()
    for dtypes in combinations:
        extents = {dim.name: 3 + i for i, dim in enumerate(signature.dims)}
        implied = signature.implied(dtypes)
        if implied is not None:
            extents[implied[0]] = extents.get(implied[1], 1)
        problem = Problem(tuple(extents.items()), tuple(dtypes.items()))
        name = short_name(problem, signature)
        assert parse_short_name(name, signature) == problem, name
        names.add(name)
    assert len(names) == len(combinations)


@pytest.mark.parametrize("operator", CATALOGUE.names)
def test_the_name_of_two_equal_dims_is_no_other_dim(operator: str) -> None:
    dims = CATALOGUE.operator(operator).signature.dims
    for i, dim in enumerate(dims):
        assert dim.like in ("", *(d.name for d in dims[:i]))
        assert dim.both not in [d.name for d in dims if d.name not in (dim.name, dim.like)]


ODD = Signature(
    dims=(Dim("rows", "r"), Dim("K2", "k")),
    dtypes=(DTypeField("dtype", ("fp32", "bf16")), DTypeField("acc_dtype", ("fp32", "dtype"))),
    options=(Option("a", ("fast", "same"), "same"), Option("b", ("same", "fast"), "same")),
    passes=(Pass("forward", (Tensor("x", ("rows", "K2")),), (Tensor("y", ("rows",)),)),),
)


def test_names_of_dims_with_digits_and_of_options_that_share_a_choice() -> None:
    problem = parse_problem("rows=4,K2=8,dtype=bf16,acc_dtype=fp32,b=fast", ODD)
    assert short_name(problem, ODD) == "rows4 K2:8 bf16 acc:fp32 b:fast"
    assert parse_short_name("rows4 K2:8 bf16 acc:fp32 b:fast", ODD) == problem


@pytest.mark.parametrize(("text", "says"), [
    ("M8 N4 bf16 fast", "unknown word 'fast'"),
    ("M8 M9 N4 bf16", "'M9' says 'M' a second time"),
    ("M8 bf16", "'N' (columns) is missing"),
    ("M8 N4", "'dtype' is missing"),
])
def test_a_malformed_name_is_refused(text: str, says: str) -> None:
    with pytest.raises(ProblemError, match="problem '") as caught:
        read_problem(text, CATALOGUE.operator("rmsnorm").signature)
    assert says in str(caught.value)
