"""Sets of whole tiles, of inputs laid out unlike each other, of runs of zeros and of one sign."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_rare_values import HEADS, PACKED, ROWS, drawn, schedule_of

from kgen.check.case import APART, OVERLAPPING, Case, unlike_groups
from kgen.check.fixture import Fixture
from kgen.check.row_values import SIGNS_BY_ROWS
from kgen.check.run_values import RUNS, cut_for_runs
from kgen.check.sizes import PROOF_SIZES, TILES
from kgen.model.problem import parse_problem


def test_each_extent_is_of_whole_tiles_once() -> None:
    made = schedule_of("linear_attention", "B=2,H=2,T=128,E=16,M=16,dtype=fp32")
    sets = list(made.extents.few_tiles(()))
    assert {dims["T"] for dims in sets} >= set(TILES)
    assert {dims["B"] for dims in sets} >= {4, 8, 16, 32}
    assert {dims["H"] for dims in sets} >= {4, 8, 16, 32}
    assert all(set(dims) == {"B", "H", "T"} for dims in made.extents.few_tiles(("E", "M")))


def test_sets_of_whole_tiles_take_few_threads() -> None:
    made = schedule_of("linear_attention", "B=2,H=2,T=128,E=16,M=16,dtype=fp32")
    assert all(
        dims["B"] * dims["H"] <= 16 for dims in made.extents.few_tiles(
            (), lambda problem: 1024 * problem.dim("B") * problem.dim("H"))
    )  # fmt: skip


@pytest.mark.parametrize("count", range(12))
def test_of_two_inputs_each_is_laid_out_without_the_other(count: int) -> None:
    names = [f"x{i}" for i in range(count)]
    groups = unlike_groups(names)
    assert len(groups) <= 6
    for one, other in itertools.permutations(names, 2):
        assert any(one in group and other not in group for group in groups)


def test_inputs_are_apart() -> None:
    made = schedule_of(*HEADS)
    problem = parse_problem(HEADS[1], made.operator.signature)
    fixture = Fixture(made.operator, "forward", problem, torch.device("cpu"), sizes=PROOF_SIZES)
    dims = (("B", 2), ("T", 4), ("H", 2))
    found = fixture.input_set(Case("normal", dims, APART, 7, only=("k",))).inputs
    k, v = found["k"].tensor, found["v"].tensor
    assert v.is_contiguous()
    assert k.stride(0) > 4 * 2 * 8
    assert k.data_ptr() % 64 == (v.data_ptr() + 32) % 64


def test_rows_overlap_and_have_one_value_there() -> None:
    made = schedule_of(*HEADS)
    problem = parse_problem("B=1,T=4,H=2,K=16,V=16,dtype=bf16", made.operator.signature)
    fixture = Fixture(made.operator, "forward", problem, torch.device("cpu"), sizes=PROOF_SIZES)
    made_set = fixture.input_set(Case("normal", (), OVERLAPPING, 7))
    k = made_set.inputs["k"].tensor
    assert k.stride() == (128, 32, 8, 1)
    assert torch.equal(k[:, :, 0, 8:], k[:, :, 1, :8])
    fixture.put_values(made_set, made_set.case)
    assert torch.equal(k, fixture.values(made_set.case, made_set.problem)["k"])


def test_runs_of_zeros_are_thirds_of_the_steps() -> None:
    k = drawn("wkv6", "B=1,T=60,H=4,K=8,V=8,dtype=fp32", RUNS, frozenset("rkvu"))["k"]
    zero = (k[0] == 0).all(-1)  # [T, H]
    assert zero.sum(0).tolist() == [20, 20, 0, 20]
    assert zero[20:40, 0].all()
    assert zero[40:, 1].all()
    assert zero[:20, 3].all()


def test_without_steps_a_run_is_of_columns() -> None:
    x = drawn(*ROWS, RUNS, frozenset({"w"}))["x"]
    assert bool((x[:, :2] == 0).all(-1).any())
    assert not bool((x == 0).all(-1).any())


def test_sequences_are_of_equal_length_or_empty() -> None:
    assert cut_for_runs(torch.tensor([0, 1, 2, 30, 60])).tolist() == [0, 15, 30, 45, 60]
    found = cut_for_runs(torch.tensor([0, 1, 2, 30, 40, 61]))
    assert found.tolist() == [0, 12, 12, 12, 48, 61]
    assert cut_for_runs(torch.tensor([0, 7])).tolist() == [0, 7]
    assert drawn("wkv6", PACKED, RUNS, frozenset())["cu_seqlens"].dtype == torch.int32


def test_rows_have_one_sign() -> None:
    v = drawn(*HEADS, SIGNS_BY_ROWS, frozenset("rkvu"))["v"].float()
    signs = v.transpose(1, 2).flatten(2).sign()
    assert bool(((signs == 1).all(-1) | (signs == -1).all(-1)).all())
    assert bool((signs == -1).any())
    assert bool((signs == 1).any())
