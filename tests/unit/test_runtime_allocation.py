"""Allocation of a known layout: what is made, and what serves where PyTorch has no short way."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kgen.runtime import allocation
from kgen.runtime.allocation import allocator
from kgen.runtime.device import KernelFile

CPU = torch.device("cpu")
SHORT = "_empty_strided_cpu"


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    """What a test says of PyTorch's short way holds for it alone."""
    allocation._short.cache_clear()
    yield
    allocation._short.cache_clear()


def guards_with(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setattr(
        torch._C, "_dynamo", SimpleNamespace(guards=SimpleNamespace(**functions))
    )


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((3, 5), (5, 1)), ((3, 5), (1, 3)), ((7,), (1,)), ((), ()), ((0, 4), (4, 1)),
     ((2, 3, 4), (4, 8, 1))],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_made_as_declared_and_each_anew(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    allocate = allocator(shape, strides, dtype, CPU)
    first, second = allocate(), allocate()
    assert (first.shape, first.stride(), first.dtype) == (shape, strides, dtype)
    assert (first.device, first.requires_grad) == (CPU, False)
    assert first.numel() == 0 or first.data_ptr() != second.data_ptr()


def test_inference_tensors_where_torch_makes_them() -> None:
    allocate = allocator((2,), (1,), torch.float32, CPU)
    with torch.inference_mode():
        assert allocate().is_inference()
    assert not allocate().is_inference()


def other_arguments(size: object) -> None:
    raise AssertionError("not reached: it takes one argument")


def not_built(*_: object) -> None:
    raise RuntimeError("PyTorch was compiled without it")


def other_order(strides: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype)


@pytest.mark.parametrize("short", [None, other_arguments, not_built, other_order])
def test_public_functions_serve_where_the_short_way_does_not(
    monkeypatch: pytest.MonkeyPatch, short: Any
) -> None:
    guards_with(monkeypatch, **({SHORT: short} if short else {}))
    made = allocator((3, 5), (1, 3), torch.float16, CPU)()
    assert (made.shape, made.stride(), made.dtype) == ((3, 5), (1, 3), torch.float16)
    assert allocation._short("cpu") is None


def test_another_gpu_may_be_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsed with GPUs that are not there: the short way allocates on the current one."""
    current = [1]
    asked: list[torch.device] = []
    monkeypatch.setattr(allocation, "current_device", lambda: current[0])
    monkeypatch.setattr(allocation, "_short", lambda kind: lambda *_: "short")

    def public(*_: object, device: torch.device, **__: object) -> str:
        asked.append(device)
        return "public"

    monkeypatch.setattr(torch, "empty_strided", public)
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    allocate: Any = allocator((4,), (1,), torch.float32, device)
    assert (allocate(), asked) == ("short", [])
    current[0] = 0
    assert (allocate(), asked) == ("public", [device])


def test_an_empty_workspace_is_made_once() -> None:
    file = KernelFile.__new__(KernelFile)
    file.device = CPU
    some, none = file.scratch(8, torch.float32), file.scratch(0, torch.float32)
    assert some() is not some()
    assert none() is none()
    assert (some().shape, none().shape) == ((8,), (0,))
