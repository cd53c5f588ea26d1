"""Sets of extents inside tiles, of round values, and of rows that are NaN or tiny."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.catalogue import open_catalogue
from kgen.check.case import FARS, Case
from kgen.check.drawing import drawn_inputs
from kgen.check.layouts import far_strides
from kgen.check.row_values import NAN_BY_ROWS, TINY_BY_ROWS, cut
from kgen.check.schedule import Schedule
from kgen.check.sizes import BETWEEN, DRAWN, PROOF_SIZES
from kgen.model.problem import parse_problem

ROWS = ("rmsnorm", "M=16,N=8,dtype=bf16,residual_dtype=dtype")
HEADS = ("wkv6", "B=2,T=64,H=7,K=8,V=8,dtype=bf16,initial_state_dtype=fp32")
PACKED = "B=1,N=4,T=64,H=2,K=8,V=8,dtype=fp32,cu_seqlens_dtype=int32"


def schedule_of(operator: str, text: str) -> Schedule:
    found = open_catalogue().operator(operator)
    problem = parse_problem(text, found.signature)
    pass_ = problem.present(found.signature.pass_named("forward"))
    return Schedule(found, pass_, problem, seed=1, sizes=PROOF_SIZES)


def drawn(operator: str, text: str, name: str, linear: frozenset[str]) -> dict[str, Tensor]:
    made = schedule_of(operator, text)
    case = Case(name, (), "contiguous", 1)
    return drawn_inputs(made.operator, made.pass_, case, made.problem, lambda: linear,
                        torch.device("cpu"))


def test_extents_inside_tiles_come_together() -> None:
    made = schedule_of("linear_attention", "B=2,H=2,T=128,E=16,M=16,dtype=fp32")
    sets = list(made.extents.between(()))
    assert len(sets) == len(BETWEEN)
    assert any(dims["E"] > 40 and dims["M"] > 40 for dims in sets)
    assert any(dims["T"] > 65 and dims["B"] > 2 for dims in sets)
    assert any(dims["T"] % 64 == 32 for dims in sets)
    assert all(made.extents.is_small(dims) for dims in sets)


def test_dims_of_the_source_stay() -> None:
    made = schedule_of("linear_attention", "B=2,H=2,T=128,E=16,M=16,dtype=fp32")
    assert all(set(dims) == {"B", "H", "T"} for dims in made.extents.between(("E", "M")))


def test_some_extents_are_other_ones_in_each_certificate() -> None:
    made = schedule_of(*ROWS)
    one, same, other = (made.host(seed, ()).cases for seed in (1, 1, 2))
    assert one == same
    both = {c.dims for c in one} & {c.dims for c in other}
    assert len({c.dims for c in one}) - len(both) == DRAWN


def test_each_stride_is_beyond_32_bits_once() -> None:
    found = [c.layout for c in schedule_of(*HEADS).host(1, (), far=True).cases]
    assert [layout for layout in found if layout in FARS] == list(FARS[:3])


def test_each_stride_of_a_pool_is_beyond_32_bits_once() -> None:
    pool = "B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int64"
    schedule = schedule_of("wkv6_decode", pool)
    [declared] = [t for t in schedule.pass_.inputs if t.in_out]
    cases = [c for c in schedule.host(1, (), far=True).cases if c.layout in FARS]
    assert [c.layout for c in cases] == list(FARS)
    shapes = [c.problem(schedule.problem, schedule.operator.signature) for c in cases]
    far = [far_strides(declared, p.shape(declared.dims), i) for i, p in enumerate(shapes)]
    assert [[stride > 2**32 for stride in strides] for strides in far] == [
        [place == dim for dim in range(4)] for place in range(4)
    ]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (TINY_BY_ROWS, [0, 1, 1, 63, 64]),
        (NAN_BY_ROWS, [0, 0, 0, 64, 64]),
        ("powers of two", [0, 1, 2, 3, 64]),
    ],
)
def test_packed_sequences_are_cut(name: str, wanted: list[int]) -> None:
    offsets = torch.tensor([0, 9, 30, 31, 64], dtype=torch.int32)
    assert cut(name, offsets).tolist() == wanted
    assert cut(name, torch.zeros(5, dtype=torch.int32)).tolist() == [0] * 5
    inputs = drawn("wkv6", PACKED, name, frozenset("rkvu"))
    assert inputs["cu_seqlens"].tolist() == wanted
    assert inputs["cu_seqlens"].dtype == torch.int32


def test_nan_has_a_sign_and_is_of_whole_rows() -> None:
    v = drawn(*HEADS, NAN_BY_ROWS, frozenset({"r", "k", "v"}))["v"]
    rows = v.isnan().transpose(1, 2).flatten(2)
    assert rows.any()
    assert not rows.all()
    assert bool((rows.all(-1) == rows.any(-1)).all())
    assert bool((v.view(torch.int16)[v.isnan()] < 0).all())


def test_other_inputs_of_a_recurrence_are_no_nan() -> None:
    assert not drawn(*HEADS, NAN_BY_ROWS, frozenset({"r", "k", "v"}))["w"].isnan().any()


def test_rows_without_steps_have_infinities() -> None:
    x = drawn(*ROWS, NAN_BY_ROWS, frozenset())["x"]
    assert bool((x == torch.inf).any())
    assert bool((x == -torch.inf).any())


def test_round_values_repeat() -> None:
    inputs = drawn(*ROWS, "powers of two", frozenset())
    x, w = inputs["x"].float(), inputs["w"]
    exact = x[x != 0].abs().log2()
    assert bool((exact == exact.round()).all())
    assert bool((x == 0).all(-1).any())
    assert torch.equal(x[1], x[0])
    assert not torch.equal(x[2], x[0])
    assert bool((w == w[0]).all())
