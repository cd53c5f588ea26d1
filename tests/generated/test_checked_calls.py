"""Calls with tensors like those of an earlier call find their launch by one look at all of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

# W alone is 32-byte aligned in PyTorch's allocations, and so is each row of 16.
X, W = torch.randn(4, 16), torch.randn(16)


def want(x: Tensor, w: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    h = x.double() + (0 if residual is None else residual.double())
    return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 if w is None else w.double())


@pytest.fixture
def forward(kgen_ops: ModuleType) -> Iterator[Any]:
    served = sys.modules["kgen_ops.rmsnorm"].FORWARD
    served.forget()
    yield served
    served.forget()


@pytest.fixture
def rmsnorm(kgen_ops: ModuleType, forward: Any) -> Any:
    """The function, compared with the definition at each call."""

    def call(x: Tensor, w: Tensor | None = None, residual: Tensor | None = None) -> None:
        made = kgen_ops.rmsnorm(x, w, residual)
        y = made if residual is None else made[0]
        torch.testing.assert_close(y.double(), want(x, w, residual), rtol=1e-5, atol=1e-6)

    return call


def found(forward: Any) -> int:
    return sum(len(checks) for checks in forward.checked.values())


def test_the_third_call_needs_no_key(forward: Any, rmsnorm: Any) -> None:
    rmsnorm(X, W)
    assert found(forward) == 0, "one that comes once is not worth it"
    rmsnorm(X, W)
    assert found(forward) == 1
    forward.prepared.clear()
    rmsnorm(torch.randn(4, 16), W)
    assert not forward.prepared, "found without"
    rmsnorm(torch.randn(5, 16), W)
    assert len(forward.prepared) == 1


def test_what_is_left_out_is_told_apart(forward: Any, rmsnorm: Any) -> None:
    given = [(X,), (X, W), (X, None, X + 1), (X, W, X + 1)]
    for _ in range(3):
        for tensors in given:
            rmsnorm(*tensors)
    assert found(forward) == 4
    assert all(len(checks) == 1 for checks in forward.checked.values())


def test_flags_are_told_apart(kgen_ops: ModuleType, forward: Any) -> None:
    for _ in range(3):
        assert isinstance(kgen_ops.rmsnorm(X, W), Tensor)
        y, rstd = kgen_ops.rmsnorm(X, W, return_rstd=True)
        assert (y.shape, rstd.shape) == ((4, 16), (4,))


def test_addresses_are_looked_at(forward: Any, rmsnorm: Any) -> None:
    for _ in range(2):
        rmsnorm(X, W)
    assert found(forward) == 1
    store = torch.randn(4 * 16 + 1)
    shifted = store[1:].view(4, 16)
    assert shifted.data_ptr() % 32
    assert X.stride() == shifted.stride()
    for _ in range(2):
        rmsnorm(shifted, W)
    assert {key[4] for key in forward.prepared} == {0, shifted.data_ptr() % 32}
    assert found(forward) == 1, "a check is of aligned tensors"


def test_a_tensor_that_stands_twice(forward: Any, rmsnorm: Any) -> None:
    for _ in range(3):
        rmsnorm(X, None, X)
    for _ in range(3):
        rmsnorm(X, None, X.clone())


def test_scalars_are_checked_all_the_same(kgen_ops: ModuleType, forward: Any) -> None:
    for _ in range(3):
        kgen_ops.rmsnorm(X, W)
    with pytest.raises(ValueError, match="eps"):
        kgen_ops.rmsnorm(X, W, eps=0.0)


def test_gradients_are_recorded_all_the_same(kgen_ops: ModuleType, forward: Any) -> None:
    x = X.clone().requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            kgen_ops.rmsnorm(x, W)
    assert found(forward) == 1
    assert kgen_ops.rmsnorm(x, W).requires_grad


def test_checks_are_bounded_and_replaced(
    forward: Any, rmsnorm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = sys.modules["kgen_ops._runtime.dispatch"]
    monkeypatch.setattr(dispatch, "MAX_CHECKED", 2)
    monkeypatch.setattr(dispatch, "REPLACED_EVERY", 3)
    for rows in (1, 2, 3):
        for _ in range(2):
            rmsnorm(torch.randn(rows, 16), W)
    (before,) = forward.checked.values()
    assert len(before) == 2
    for _ in range(2):  # with the one above the third that no check knows
        rmsnorm(torch.randn(3, 16), W)
    (after,) = forward.checked.values()
    assert len(after) == 2
    assert after[0] is before[1], "the oldest made room"
    assert after[1][0](torch.randn(3, 16), W, sys.modules["kgen_ops.rmsnorm"]._no_residual)


def test_without_pytorchs_check(
    forward: Any, rmsnorm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kgen_ops._runtime.dispatch"], "tensor_check", lambda _: None)
    for _ in range(3):
        rmsnorm(X, W)
    assert found(forward) == 0
    assert len(forward.prepared) == 1
