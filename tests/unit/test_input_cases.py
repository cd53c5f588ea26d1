"""Values that the operators' input cases promise, beyond what tests of one operator check."""

from __future__ import annotations

import pytest
import torch

from kgen.catalogue import open_catalogue
from kgen.model.problem import parse_problem
from kgen.operators._shared import plant_at_ends, rare_decays


def inputs(operator: str, problem: str, case: str, pass_name: str) -> dict[str, torch.Tensor]:
    declared = open_catalogue().entry(operator).operator
    generator = torch.Generator().manual_seed(1)
    parsed = parse_problem(problem, declared.signature)
    return declared.make_inputs(pass_name, parsed, case, generator, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(7,), (2, 8), (1, 5, 2, 3)])
def test_each_kind_of_rare_decay_is_there(shape: tuple[int, ...]) -> None:
    decays = rare_decays(torch.rand(shape, generator=torch.Generator().manual_seed(2))).flatten()
    assert (decays[3::4] == 0).all()
    assert ((decays[1::4] <= -9) & (decays[1::4] >= -20)).all()
    assert ((decays[2::4] < 0) & (decays[2::4] >= -1e-6)).all()
    assert ((decays[::4] < 0) & (decays[::4] >= -1e-2)).all()


@pytest.mark.parametrize("seed", range(5))
def test_wkv4_has_each_extreme_decay(seed: int) -> None:
    declared = open_catalogue().entry("wkv4").operator
    problem = parse_problem("B=1,T=2,C=7,dtype=fp32", declared.signature)
    generator = torch.Generator().manual_seed(seed)
    cpu = torch.device("cpu")
    drawn = declared.make_inputs("forward", problem, "extreme_decay", generator, cpu)
    assert len(set(drawn["w"].tolist())) == 7


def test_every_second_sequence_has_nan_at_both_ends() -> None:
    rows = {name: torch.zeros(1, 10, 2, 3) for name in ("r", "k", "v")}
    sequences = torch.tensor([0, 2, 6, 6, 9, 10])  # steps 2 to 5 and 6 to 8 are every second one
    plant_at_ends({**rows, "cu_seqlens": sequences})
    for x in rows.values():
        steps = x.isnan().flatten(2).all(-1)[0]
        assert steps.nonzero().flatten().tolist() == [2, 5, 6, 8]
        assert torch.equal(x.isnan().flatten(2).any(-1)[0], steps)


def test_every_second_batch_row_has_nan_at_both_ends() -> None:
    rows = {name: torch.zeros(3, 4, 1, 2) for name in ("r", "k", "v", "gy")}
    plant_at_ends(rows)
    for x in rows.values():
        assert x.isnan()[1, [0, 3]].all()
        assert x.isnan().sum() == 2 * 2


@pytest.mark.parametrize("operator", ["wkv5", "wkv6", "wkv7"])
def test_other_sequences_stay_finite(operator: str) -> None:
    declared = open_catalogue().entry(operator).operator
    problem = "B=1,N=4,T=40,H=2,K=4,V=4,dtype=fp32,cu_seqlens_dtype=int64"
    drawn = inputs(operator, problem, "nonfinite_ends", "forward")
    ends = drawn["cu_seqlens"].tolist()
    form = dict(parse_problem(problem, declared.signature).dtypes)["decay_form"]
    y = declared.definition("forward", drawn, {"scale": 1.0, f"decay_form={form}": 1.0})["y"]
    for number in range(4):
        part = y[:, ends[number] : ends[number + 1]]
        assert part.isnan().any() == (number % 2 == 1 and part.numel() > 0)


def test_norms_are_negative() -> None:
    problem = "B=2,H=2,T=20,E=4,M=4,dtype=fp32,norm_dtype=fp32,initial_key_sum_dtype=fp32"
    declared = open_catalogue().entry("linear_attention").operator
    drawn = inputs("linear_attention", problem, "negative_norm", "forward")
    made = declared.definition("forward", drawn, {"scale": 1.0, "eps": 1e-6})
    assert (made["norm"] < -1e-2).all()
    assert (inputs("linear_attention", problem, "negative_norm", "backward")["norm"] < 0).all()


def test_rows_below_eps_and_outliers_are_those_of_the_sum() -> None:
    drawn = inputs("rmsnorm", "M=9,N=300,dtype=fp32,residual_dtype=fp32", "uneven_rows", "forward")
    rows = drawn["x"] + drawn["residual"]
    squares = rows.square().mean(-1)
    assert (squares[1::3] < 1e-10).all()
    assert (rows[2::3].abs().max(-1).values > 8 * squares[2::3].sqrt()).all()


def test_the_last_32_bits_of_an_index_are_a_slot() -> None:
    problem = "B=12,S=20,T=1,H=1,K=4,V=4,dtype=fp32,state_indices_dtype=int64"
    for case, sign in (("skipped", -1), ("out_of_range", 1)):
        slots = inputs("wkv6_decode", problem, case, "forward")["state_indices"]
        wrapped = slots[(slots % 2**32 < 20) & ((slots < 0) | (slots >= 20))]
        assert wrapped.numel() > 0
        assert (wrapped.sign() == sign).all()
