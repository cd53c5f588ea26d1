"""Sets of ones, of one step alone, of weights of zeros; of inputs laid out alone."""

from __future__ import annotations

import pytest
import torch
from test_rare_values import HEADS, PACKED, ROWS, drawn, schedule_of

from kgen.check.lone_values import ONE_STEP, ONES
from kgen.check.row_values import TINY_BY_ROWS
from kgen.check.shaped_values import SHAPES

LINEAR = frozenset({"r", "k", "v", "u", "initial_state"})


def test_the_first_input_and_the_weights_are_ones() -> None:
    found = drawn(*HEADS, ONES, LINEAR)
    assert bool((found["r"] == 1).all() and (found["u"] == 1).all())
    assert not any(bool((found[name] == 1).all()) for name in ("k", "v", "initial_state"))


def test_one_step_alone_is_not_zero() -> None:
    r = drawn(*HEADS, ONE_STEP, LINEAR)["r"][0].abs().sum(-1)  # [T, H]
    steps = [r[:, h].nonzero().flatten().tolist() for h in range(7)]
    assert steps[:4] == [[63], [0], [32], [21]]
    assert steps[4:] == [list(range(32, 64)), [0], list(range(64))]


def test_decays_are_equal_along_the_keys_in_some_rows() -> None:
    w = drawn(*HEADS, SHAPES, LINEAR)["w"]
    rows = w.permute(0, 2, 1, 3).flatten(0, 1)  # [B * H, T, K]
    equal = (rows == rows[..., :1]).all(-1).all(-1) & (rows < -1e-6).all(-1).all(-1)
    assert equal.nonzero().flatten().tolist() == [0, 5, 8, 13]
    alike = equal & (rows == rows[:, :1]).all(-1).all(-1)
    assert alike.nonzero().flatten().tolist() == [0, 13]
    assert (rows == 0).all(-1).all(-1).nonzero().flatten().tolist() == [1, 6, 9]


def test_states_are_the_unit_matrix_in_some_rows() -> None:
    states = drawn(*HEADS, ONE_STEP, LINEAR)["initial_state"].flatten(0, 1)
    assert any(torch.equal(state, torch.eye(8)) for state in states)
    assert any(state.count_nonzero() == 1 for state in states)


def test_the_gain_is_zero_without_steps_alone() -> None:
    names = [c.name for c in schedule_of(*ROWS).host(1, ()).cases]
    assert "zero weights" in names
    assert "zero weights" not in [c.name for c in schedule_of(*HEADS).host(1, ()).cases]
    assert bool((drawn(*ROWS, "zero weights", frozenset({"w"}))["w"] == 0).all())


def test_rows_are_huge_but_not_in_fp16() -> None:
    largest = {
        dtype: float(max(
            x.abs().max() for x in drawn(
                "wkv6", HEADS[1].replace("bf16", dtype), TINY_BY_ROWS, LINEAR).values()
        ))
        for dtype in ("bf16", "fp16")
    }  # fmt: skip
    assert largest["bf16"] > 2.0**39
    assert largest["fp16"] < 100


@pytest.mark.parametrize(
    ("name", "wanted"), [(ONES, [0, 0, 0, 0, 64]), ("small and large", [0, 16, 32, 48, 64])]
)
def test_packed_sequences_are_cut(name: str, wanted: list[int]) -> None:
    assert drawn("wkv6", PACKED, name, frozenset("rkvu"))["cu_seqlens"].tolist() == wanted


def test_each_input_is_laid_out_alone() -> None:
    found = [c.only for c in schedule_of(*HEADS).host(1, ()).cases if c.layout == "strided"]
    assert {("r",), ("k",), ("v",), ("w",)} <= set(found)


def test_one_step_alone_is_not_in_packed_sequences() -> None:
    names = {
        text: [c.name for c in schedule_of("wkv6", text).host(1, ()).cases]
        for text in (HEADS[1], PACKED)
    }
    assert ONE_STEP in names[HEADS[1]]
    assert ONE_STEP not in names[PACKED]
    assert ONES in names[PACKED]


def test_indices_keep_their_values() -> None:
    text = "B=3,S=5,T=3,H=2,K=8,V=8,dtype=fp32,state_indices_dtype=int64"
    found = drawn("wkv5_decode", text, ONE_STEP, frozenset("rkv"))["state_indices"]
    assert len(set(found.tolist())) == 3, "two sequences would share a state"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_several_inputs_have_kinds_in_fp32_alone(dtype: str) -> None:
    text = f"B=2,T=40,H=11,K=8,V=8,dtype={dtype},w_dtype={dtype},decay_form=log"
    a = drawn("wkv7", text, SHAPES, frozenset("rkv"))["a"]
    equal = (a == a[..., :1]).all(-1).all(1) & (a != 0).all(-1).all(1)
    assert bool(equal.any()) is (dtype == "fp32")
