"""The fast path's single check of all tensors of a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kgen.runtime import fast_path

X, W = torch.empty(4, 6), torch.empty(6)


@pytest.fixture
def check() -> fast_path.TensorCheck:
    found = fast_path.tensor_check((X, W))
    assert found is not None, "this PyTorch has no TensorGuards, or one that does something else"
    return found


def test_tensors_of_the_same_layout_pass(check: fast_path.TensorCheck) -> None:
    assert check(X, W)
    assert check(torch.ones(4, 6), torch.ones(6))
    assert check(torch.ones(8, 6)[4:], torch.ones(7)[1:]), "where they begin is not looked at"


@pytest.mark.parametrize(("x", "w"), [
    (torch.ones(4, 5), W), (torch.ones(4, 6, 1), W), (torch.ones(6, 4).T, W),
    (torch.ones(4, 12)[:, :6], W), (X.double(), W), (X, W.half()), (X.to("meta"), W),
    (X, torch.nn.Parameter(W)), (X, None), (3, W), (X, torch.ones(12)[::2]),
    (torch._neg_view(X), W), (X, torch._neg_view(W)),
])  # fmt: skip
def test_others_do_not(check: fast_path.TensorCheck, x: object, w: object) -> None:
    assert not check(x, w)


def test_an_object_does_not_stand_twice() -> None:
    check = fast_path.tensor_check((X, torch.empty(4, 6)))
    assert check is not None
    assert check(X, torch.ones(4, 6))
    assert not check(X, X)


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("state", [lambda: torch.autocast("cpu"), torch.inference_mode, Mode])
def test_what_sends_a_call_through_the_dispatcher_does_not_pass(
    check: fast_path.TensorCheck, state: Callable[[], object]
) -> None:
    with state():  # type: ignore[attr-defined]
        assert not check(X, W)
    assert check(X, W)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_transforms_do_not_pass(
    check: fast_path.TensorCheck,
    transform: Callable[[Callable[..., object]], Callable[..., object]],
) -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(check(X, W) or check(x, W))
        return x

    transform(look)(torch.ones(2, 4, 6))
    assert seen == [False]


def test_it_may_be_asked_for_first_inside_a_region() -> None:
    fast_path._maker.cache_clear()
    with torch.autocast("cpu"):
        check = fast_path.tensor_check((X, W))
        assert check is not None
        assert check(X, W)
    assert not check(X, W)


@pytest.mark.parametrize("guards", [
    None, type("Guards", (), {}), type("Guards", (), {"TensorGuards": lambda *_, **__: 1 / 1}),
    type("Guards", (), {"TensorGuards": lambda *_: None}),
    type("Guards", (), {"TensorGuards": type("Any", (), {
        "__init__": lambda *_, **__: None, "check": lambda *_: True})}),
])  # fmt: skip
def test_a_pytorch_that_has_it_not_or_another_one(
    monkeypatch: pytest.MonkeyPatch, guards: object
) -> None:
    monkeypatch.setattr(torch._C._dynamo, "guards", guards)
    fast_path._maker.cache_clear()
    try:
        assert fast_path.tensor_check((X, W)) is None
    finally:
        fast_path._maker.cache_clear()
