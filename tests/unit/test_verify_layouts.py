"""Inputs with unusual layouts: views of one tensor, shared memory, strides of 0 or beyond 32 bits.

The tests also check the values that these sets have.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.catalogue import open_catalogue
from kgen.check import Fixture
from kgen.check.buffers import Far, fingerprint
from kgen.check.case import EXPANDED, FAR, NORMAL, SHARED, VIEWS, Case, Layout
from kgen.check.hard_values import LARGE_WEIGHTS, NAN_WITH, NANS, ZEROS, with_nearby_values
from kgen.check.input_set import InputSet
from kgen.check.row_values import BY_ROWS
from kgen.check.schedule import Schedule
from kgen.check.sizes import GPU_SIZES, PROOF_SIZES, Sizes
from kgen.model.problem import parse_problem

CPU = torch.device("cpu")
WKV6 = "B=2,T=9,H=3,K=8,V=8,dtype=fp32,initial_state_dtype=fp32"


def fixture_of(operator: str, problem: str, pass_name: str = "forward") -> Fixture:
    found = open_catalogue().entry(operator).operator
    return Fixture(found, pass_name, parse_problem(problem, found.signature), CPU, seed=3)


def made(fixture: Fixture, layout: Layout, name: str = NORMAL) -> InputSet:
    return fixture.input_set(Case(name, (), layout, 7))


def addresses(found: InputSet, *names: str) -> list[int]:
    return [found.inputs[name].tensor.data_ptr() for name in names]


def test_views_lie_side_by_side_in_rows_of_one_tensor() -> None:
    found = made(fixture_of("wkv6", WKV6), VIEWS)
    r, k, v, w = (found.inputs[name] for name in "rkvw")
    assert r.arena is k.arena is v.arena is w.arena
    assert r.tensor.stride() == w.tensor.stride() == (9 * 3 * 32, 3 * 32, 32, 1)
    assert addresses(found, "k")[0] == addresses(found, "r")[0] + 8 * 4
    assert not any(bool(x) for x in r.damage())


def test_shared_memory_has_equal_values_of_inputs_that_take_any() -> None:
    found = made(fixture_of("wkv6", WKV6), SHARED)
    assert len(set(addresses(found, *"rkv"))) == 1
    assert found.inputs["w"].tensor.max() <= 0, "a decay takes no other input's values"
    one = made(fixture_of("rmsnorm", "M=5,N=8,dtype=fp32,residual_dtype=fp32"), SHARED)
    assert len(set(addresses(one, "x", "residual"))) == 1
    turned = made(fixture_of("wkv7", WKV6), SHARED)
    assert len(set(addresses(turned, *"wab"))) == 3, "a recurrence may grow by those"


def test_in_few_steps_all_inputs_share_memory_and_are_small() -> None:
    few = fixture_of("wkv7", WKV6.replace("T=9", "T=3"))
    shared, ordinary = (made(few, layout) for layout in (SHARED, "contiguous"))
    assert len(set(addresses(shared, *"rwkvab"))) == 1
    # With ordinary values the state would grow by the square of a row's norm in each step.
    assert torch.equal(shared.inputs["r"].tensor, ordinary.inputs["r"].tensor / 8)


def test_expanded_inputs_have_a_stride_of_0_and_equal_values() -> None:
    fixture = fixture_of("wkv6", WKV6)
    found = made(fixture, EXPANDED)
    assert [found.inputs[n].tensor.stride().index(0) for n in "rkvw"] == [0, 1, 2, 0]
    for name in "rkvw":
        tensor = found.inputs[name].tensor
        dim = tensor.stride().index(0)
        assert torch.equal(tensor, tensor.narrow(dim, 0, 1).expand_as(tensor))
    assert not torch.equal(*found.inputs["r"].tensor[0, :2])
    fixture.put_values(found, Case("normal", (), EXPANDED, 8))
    alone = fixture.input_set(Case("normal", (), EXPANDED, 7, only=("k",)))
    assert 0 not in alone.inputs["r"].tensor.stride()


def test_far_rows_take_addresses_and_no_memory() -> None:
    found = made(fixture_of("rmsnorm", "M=2,N=8,dtype=fp32"), FAR)
    x = found.inputs["x"]
    assert isinstance(x, Far)
    assert x.tensor.stride(0) > 2**32
    before = fingerprint(x)
    x.tensor[1, 3] += 1
    assert bool((fingerprint(x) != before).any())


def test_a_set_of_far_rows_is_for_runs_that_copy_no_memory() -> None:
    schedule = fixture_of("rmsnorm", "M=37,N=40,dtype=fp32").schedule
    assert [c.layout for c in schedule.host(1, (), far=True).cases].count(FAR) == 1
    assert FAR not in [c.layout for c in schedule.host(1, ()).cases]
    assert FAR not in [c.layout for c in schedule.certify(1, ())]


@pytest.mark.parametrize("sizes", [GPU_SIZES, PROOF_SIZES])
def test_strides_between_batch_rows_are_tried(sizes: Sizes) -> None:
    operator = open_catalogue().entry("wkv6").operator
    problem = parse_problem("B=8,T=4096,H=32,K=64,V=64,dtype=bf16", operator.signature)
    pass_ = operator.signature.pass_named("forward")
    schedule = Schedule(operator, problem.present(pass_), problem, 0, sizes)
    cases = schedule.host(1, {"K", "V"}).cases
    for case in [*cases, *schedule.certify(1, {"K", "V"})]:
        if case.layout != "contiguous":
            assert dict(case.dims).get("B", 8) > 1, case.label
            assert dict(case.dims).get("H", 32) > 1, case.label
    assert any(dict(c.dims).get("H") == 3 and dict(c.dims)["B"] == 2 for c in cases)


def test_the_first_and_the_last_linear_input_are_zero() -> None:
    problem = "B=1,T=9,H=3,K=8,V=8,dtype=fp32,final_state_dtype=fp32"
    fixture = fixture_of("wkv6", problem, "backward")
    first, last = (fixture.input_set(Case(name, (), "contiguous", 7)) for name in ZEROS)
    assert not bool(first.inputs["gy"].tensor.any())
    assert bool(first.inputs["gfinal_state"].tensor.any())
    assert not bool(last.inputs["gfinal_state"].tensor.any())
    assert bool(last.inputs["gy"].tensor.any())


def test_rows_have_zeros_in_an_input_each_or_equal_values() -> None:
    found = made(fixture_of("wkv6", WKV6), "contiguous", BY_ROWS)
    kinds = {}
    for name, dim in (("r", 2), ("k", 2), ("v", 2), ("w", 2), ("initial_state", 1)):
        rows = found.inputs[name].tensor.movedim(dim, 1).flatten(0, 1)
        kinds[name] = "".join(kind_of(row) for row in rows)
    assert kinds == {
        "r": "...0.=", "k": "0....=", "v": ".0...=", "w": "......", "initial_state": "....0=",
    }  # fmt: skip
    assert "".join(kind_of(row) for row in found.inputs["u"].tensor) == "..0"
    one = made(fixture_of("rmsnorm", "M=4,N=8,dtype=fp32"), "contiguous", BY_ROWS)
    assert "".join(kind_of(row) for row in one.inputs["x"].tensor) == ".=.."


def kind_of(row: Tensor) -> str:
    if not bool(row.any()):
        return "0"
    return "=" if bool((row == row[..., :1]).all()) else "."


def test_weights_have_both_infinities() -> None:
    u = made(fixture_of("wkv6", WKV6), "contiguous", NANS[1]).inputs["u"].tensor
    assert [int(x.sum()) for x in (u.isnan(), u == torch.inf, u == -torch.inf)] == [1, 1, 1]
    fixture = fixture_of("rmsnorm", "M=4,N=8,dtype=fp32")  # its own case has a NaN in w
    own = made(fixture, "contiguous", NANS[1]).inputs["w"].tensor
    assert [int(x.sum()) for x in (own.isnan(), own == torch.inf, own == -torch.inf)] == [0, 1, 1]


def test_own_cases_take_turns_with_a_nan() -> None:
    fixture = fixture_of("wkv6", WKV6)
    schedule = Schedule(fixture.operator, fixture.pass_, fixture.problem, seed=1)
    names = {case.name for case in schedule.certify(1, ())}
    with_nan = set()
    for name in fixture.operator.cases:
        is_left_out = name.startswith("nonfinite")
        assert (f"{NAN_WITH}{name}" in names) == (not is_left_out)
        if not is_left_out:
            inputs = made(fixture, "contiguous", f"{NAN_WITH}{name}").inputs
            has = [n for n, x in inputs.items() if bool(x.tensor.isnan().any())]
            assert len(has) == 1, (name, has)
            assert int(inputs[has[0]].tensor.isnan().sum()) == 1
            with_nan |= set(has)
    assert with_nan == {"r", "k", "v", "initial_state"}  # not in the decays and the bonus
    w = made(fixture, "contiguous", f"{NAN_WITH}extreme_decay").inputs["w"].tensor
    assert bool(w.isneginf().any())


def test_large_weights_are_those_with_both_signs() -> None:
    fixture = fixture_of("wkv4", "B=2,T=9,C=64,dtype=fp32")
    ordinary, large = (made(fixture, "contiguous", name).inputs for name in (NORMAL, LARGE_WEIGHTS))
    assert torch.equal(large["u"].tensor, 64 * ordinary["u"].tensor)
    for name in ("k", "v", "w"):  # rows, and a decay below 0
        assert torch.equal(large[name].tensor, ordinary[name].tensor)


def test_every_second_zero_is_negative_and_every_second_infinity_100() -> None:
    inf = torch.inf
    drawn = {"w": torch.tensor([0.0, 0.0, -inf, -inf, inf, 1.0]), "x": torch.zeros(2)}
    found = with_nearby_values(drawn, frozenset("x"))
    assert found["w"].tolist() == [0.0, 0.0, -inf, -100.0, inf, 1.0]
    assert found["w"].signbit().tolist() == [False, True, True, True, False, False]
    assert not bool(found["x"].signbit().any())
