"""Calls with tensors like those of an earlier call are served by one check of all tensors."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from operator_cases import CASES, Case, agree, close, wide
from torch import Tensor

# W alone is 32-byte aligned in PyTorch's allocations, and so is each row of 16.
X, W = torch.randn(4, 16), torch.randn(16)


def want(x: Tensor, w: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    h = x.double() + (0 if residual is None else residual.double())
    return h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 if w is None else w.double())


@pytest.fixture
def forward(kgen_ops: ModuleType, extensions: Any) -> Iterator[Any]:
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


def count(forward: Any) -> int:
    return sum(len(paths) for paths in forward.fast_paths.values())


def test_the_third_call_needs_no_key(forward: Any, rmsnorm: Any) -> None:
    rmsnorm(X, W)
    assert count(forward) == 0, "one that comes once is not worth it"
    rmsnorm(X, W)
    assert count(forward) == 1
    forward.prepared.clear()
    rmsnorm(torch.randn(4, 16), W)
    assert not forward.prepared, "found without"
    rmsnorm(torch.randn(5, 16), W)
    assert len(forward.prepared) == 1


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_both_passes_of_every_operator(
    kgen_ops: ModuleType, extensions: Any, case: Case
) -> None:
    """Their workspaces and scalars are where the launches look for them."""
    module = sys.modules[f"kgen_ops.{case.operator}"]
    for served in (module.FORWARD, module.BACKWARD):
        served.forget()
    inputs = case.inputs_on("cpu")
    for _ in range(4):
        agree(case, lambda **given: case.call(kgen_ops, **given), inputs)
    assert count(module.BACKWARD) == 1
    with torch.no_grad():
        want = case.reference(**wide(inputs))
        for _ in range(4):
            for one, other in zip(case.call(kgen_ops, **inputs), want, strict=False):
                close(one, other)
    assert count(module.FORWARD) == 1
    for served in (module.FORWARD, module.BACKWARD):
        served.forget()


def test_what_is_left_out_is_told_apart(forward: Any, rmsnorm: Any) -> None:
    given = [(X,), (X, W), (X, None, X + 1), (X, W, X + 1)]
    for _ in range(3):
        for tensors in given:
            rmsnorm(*tensors)
    assert count(forward) == 4
    assert all(len(paths) == 1 for paths in forward.fast_paths.values())


def test_flags_are_told_apart(kgen_ops: ModuleType, forward: Any) -> None:
    for _ in range(3):
        assert isinstance(kgen_ops.rmsnorm(X, W), Tensor)
        y, rstd = kgen_ops.rmsnorm(X, W, return_rstd=True)
        assert (y.shape, rstd.shape) == ((4, 16), (4,))


def test_addresses_are_looked_at(forward: Any, rmsnorm: Any) -> None:
    for _ in range(2):
        rmsnorm(X, W)
    assert count(forward) == 1
    store = torch.randn(4 * 16 + 1)
    shifted = store[1:].view(4, 16)
    assert shifted.data_ptr() % 32
    assert X.stride() == shifted.stride()
    for _ in range(2):
        rmsnorm(shifted, W)
    assert {key[4] for key in forward.prepared} == {0, shifted.data_ptr() % 32}
    assert count(forward) == 1, "they are of aligned tensors"


def test_a_tensor_that_stands_twice(forward: Any, rmsnorm: Any) -> None:
    for _ in range(3):
        rmsnorm(X, None, X)
    assert count(forward) == 0, "such a call would never be served"
    for _ in range(3):
        rmsnorm(X, None, X.clone())
    assert count(forward) == 1


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
    assert count(forward) == 1
    assert kgen_ops.rmsnorm(x, W).requires_grad


def test_they_are_bounded_and_replaced(
    forward: Any, rmsnorm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch = sys.modules["kgen_ops._runtime.dispatch"]
    monkeypatch.setattr(dispatch, "MAX_FAST_PATHS", 2)
    monkeypatch.setattr(dispatch, "REPLACED_EVERY", 3)
    for rows in (1, 2, 3):
        for _ in range(2):
            rmsnorm(torch.randn(rows, 16), W)
    (before,) = forward.fast_paths.values()
    assert len(before) == 2
    for _ in range(2):  # with the one above the third that none knows
        rmsnorm(torch.randn(3, 16), W)
    (after,) = forward.fast_paths.values()
    assert len(after) == 2
    assert after[0] is before[1], "the oldest made room"
    assert after[1](torch.randn(3, 16), W, None, 1e-6, 0.0) is not None
    assert after[1](torch.randn(4, 16), W, None, 1e-6, 0.0) is None


@pytest.mark.parametrize("missing", ["_maker", "extension"])
def test_without(
    forward: Any, rmsnorm: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """PyTorch's check, or the extension."""
    fast_path = sys.modules["kgen_ops._runtime.fast_path"]
    monkeypatch.setattr(fast_path, missing, lambda *_: None)
    for _ in range(3):
        rmsnorm(X, W)
    assert count(forward) == 0
    assert len(forward.prepared) == 1


class Calls:
    """What a FastPath calls, and in which order."""

    def __init__(self, extensions: Any) -> None:
        self.seen: list[Any] = []
        self.alike: Any = True
        self.gradients: Any = False
        self.make = extensions.extension("_fast_path").FastPath

    def fast_path(
        self, given: tuple[bool, ...], outputs: tuple[Any, ...], scalars: int = 0,
        alignment: int = 32, scratch: tuple[Any, ...] = (), launches: Any = None,
        current_device: Any = None, is_grad_enabled: Any = None, result: Any = tuple,
    ) -> Any:
        slots = bytes(range(1 + len(given) + len(outputs) + len(scratch) + scalars))
        if launches is None:  # one that takes all values in their order
            launches = ((self.launch, (None,) * len(slots), slots),)
        return self.make(
            self.check, given, launches, scalars, self.stream, 3, current_device, outputs, scratch,
            Tensor.data_ptr, is_grad_enabled or (lambda: self.gradients), alignment,
            result,
        )

    def check(self, *tensors: object) -> Any:
        self.seen.append(("check", *(id(t) for t in tensors)))
        return self.alike

    def stream(self, device: int) -> int:
        return 1000 + device

    def launch(self, *arguments: object) -> None:
        self.seen.append(("launch", *arguments))


@pytest.fixture
def calls(extensions: Any) -> Calls:
    return Calls(extensions)


def test_what_is_launched(calls: Calls) -> None:
    y, h = torch.empty(4), torch.empty(4)
    fast_path = calls.fast_path((True, False, True), (lambda: y, None, lambda: h), 2)
    assert fast_path(X, None, W, 0.5, 7) == (y, h)
    assert calls.seen == [
        ("check", id(X), id(W)),
        ("launch", 1003, X.data_ptr(), 0, W.data_ptr(), y.data_ptr(), 0, h.data_ptr(), 0.5, 7),
    ]
    assert calls.fast_path((True,), (lambda: y,))(X) is y


class Outputs(NamedTuple):
    y: Tensor
    h: Tensor


class StatefulTuple(tuple[Tensor, ...]):  # it has a dict, which the fast path would not make
    pass


def test_several_outputs_are_a_named_tuple(calls: Calls) -> None:
    y, h = torch.empty(4), torch.empty(4)
    before = sys.getrefcount(y), sys.getrefcount(Outputs)
    fast_path = calls.fast_path((True,), (lambda: y, None, lambda: h), result=Outputs)
    for _ in range(100):
        made = fast_path(X)
    assert type(made) is Outputs
    assert made.y is y
    assert made.h is h
    assert gc.is_tracked(made)
    assert type(calls.fast_path((True,), (lambda: y, lambda: h))(X)) is tuple
    assert calls.fast_path((True,), (lambda: y,), result=Outputs)(X) is y
    del made, fast_path
    assert (sys.getrefcount(y), sys.getrefcount(Outputs)) == before


@pytest.mark.parametrize("result", [list, StatefulTuple, 3])
def test_results_that_are_no_named_tuple(calls: Calls, result: object) -> None:
    with pytest.raises(TypeError):
        calls.fast_path((True,), (lambda: W, lambda: W), result=result)


def test_several_launches_with_a_workspace(calls: Calls) -> None:
    y, parts = torch.empty(4), torch.empty(9)
    launches = (
        (calls.launch, (None, 64, None, None), bytes((0, 255, 1, 3))),
        (calls.launch, (None, None, None, None, "c"), bytes((0, 3, 2, 4, 255))),
    )
    fast_path = calls.fast_path(
        (True,), (lambda: y,), 1, scratch=(lambda: parts,), launches=launches
    )
    before = sys.getrefcount(parts)
    assert fast_path(X, 0.5) is y
    assert calls.seen[1:] == [
        ("launch", 1003, 64, X.data_ptr(), parts.data_ptr()),
        ("launch", 1003, parts.data_ptr(), y.data_ptr(), 0.5, "c"),
    ]
    assert sys.getrefcount(parts) == before
    none = calls.fast_path((True,), (lambda: y,), launches=())
    assert none(X) is y


def test_workspaces_live_until_all_is_launched(calls: Calls) -> None:
    made: list[weakref.ref[Tensor]] = []
    lived: list[bool] = []

    def scratch() -> Tensor:
        parts = torch.empty(9)
        made.append(weakref.ref(parts))
        return parts

    calls.launch = lambda *_: lived.append(made[0]() is not None)  # type: ignore[method-assign]
    launch = (calls.launch, (None,), b"\0")
    calls.fast_path((True,), (lambda: W,), scratch=(scratch,), launches=(launch, launch))(X)
    assert lived == [True, True]
    assert made[0]() is None


def test_none_is_made_while_another_device_is_current(
    forward: Any, rmsnorm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would serve no such call, and each would make one more."""
    dispatch = sys.modules["kgen_ops._runtime.dispatch"]
    with monkeypatch.context() as several:
        several.setattr(dispatch, "several_devices", lambda device: True)
        several.setattr(dispatch, "current_device", lambda: 5)
        for _ in range(3):
            rmsnorm(X, W)
    assert count(forward) == 0
    rmsnorm(X, W)
    assert count(forward) == 1


def test_while_another_device_is_current(calls: Calls) -> None:
    current = [3]
    fast_path = calls.fast_path((True,), (lambda: W,), current_device=lambda: current[0])
    assert fast_path(X) is W
    current[0] = 2
    assert fast_path(X) is None
    assert [name for name, *_ in calls.seen].count("launch") == 1


def test_what_goes_the_general_way(calls: Calls) -> None:
    fast_path = calls.fast_path((True, True), (lambda: torch.empty(4),))
    assert fast_path(X, torch.randn(9)[1:]) is None, "its address"
    calls.gradients = True
    assert fast_path(X, W.clone().requires_grad_()) is None
    assert fast_path(X, None) is None, "what was given"
    assert fast_path(X, W) is not None
    calls.alike = False
    assert fast_path(X, W) is None
    assert [name for name, *_ in calls.seen].count("launch") == 1


def failing(*_: object) -> Any:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize(
    "step",
    ["check", "stream", "launch", "output", "scratch", "gradients", "device", "tensor"],
)
def test_errors_pass_through(calls: Calls, step: str) -> None:
    if step in ("check", "stream", "launch"):
        setattr(calls, step, failing)
    output = failing if step == "output" else lambda: torch.empty(4)
    fast_path = calls.fast_path(
        (True,), (output, lambda: W), scratch=(failing if step == "scratch" else lambda: W,),
        current_device=failing if step == "device" else None,
        is_grad_enabled=failing if step == "gradients" else None,
    )
    wrong = TypeError if step == "tensor" else ArithmeticError
    before = sys.getrefcount(X)
    for _ in range(3):
        with pytest.raises(wrong):
            fast_path(5 if step == "tensor" else X)
    assert sys.getrefcount(X) == before


def test_bad_arguments(calls: Calls) -> None:
    with pytest.raises(ValueError, match="alignment must be a power of two, got 24"):
        calls.fast_path((True,), (), alignment=24)
    with pytest.raises(ValueError, match="60 inputs, 1 outputs, 2 workspaces and 1 scalars; 63"):
        calls.fast_path((True,) * 60, (None,), 1, scratch=(failing, failing))
    for launches, message in (
        (((failing, (1, 2), b"\0"),), "launch 0 has 2 arguments and 1 slots"),
        (((failing, (0,) * 133, b"\0" * 133),), "launch 0 has 133 .* 132 at most"),
        (((failing, (1, None), b"\xff\2"),), "argument 1 is of slot 2, and .* has 2 values"),
    ):
        with pytest.raises(ValueError, match=message):
            calls.fast_path((True,), (), launches=launches)
    with pytest.raises(TypeError, match="launch 0 must be a tuple, got 5"):
        calls.fast_path((True,), (), launches=(5,))
    with pytest.raises(TypeError, match=r"a launch is \(launcher, arguments, slots\)"):
        calls.fast_path((True,), (), launches=((failing, 5, b""),))
    with pytest.raises(TypeError, match=r"takes 2 tensors and 0 scalars .* got 1"):
        calls.fast_path((True, True), (lambda: W,))(X)
    with pytest.raises(TypeError, match="by position"):
        calls.fast_path((True,), (lambda: W,))(X, eps=1.0)


def test_calls_leave_nothing_behind(calls: Calls) -> None:
    calls.launch = lambda *_: None  # type: ignore[method-assign]
    calls.check = lambda *_: True  # type: ignore[method-assign]
    fast_path = calls.fast_path((True, False, True),
                        (lambda: torch.empty(2), None, lambda: torch.empty(3)), 1,
                        scratch=(lambda: torch.empty(5),))
    objects = []
    for _ in range(3):
        for _ in range(500):
            fast_path(X, None, W, 1.5)
            fast_path(X, torch.randn(9)[1:], W, 1.5)
        gc.collect()
        objects.append(sys.getallocatedblocks())
    assert objects[2] - objects[1] < 50
