"""Fast path: a call whose shapes, strides, dtypes and alignment were seen before skips dispatch.

Reading shape, strides, dtype and device of a tensor from Python takes 0.5 us of host time per
tensor, and the lookup by them takes more. `torch.compile` has a guard, `TensorGuards`, that
compares all of them with the values of an earlier call, and the dispatch state as well: 0.1 us per
call and 0.06 us per tensor. If the guard passes, the extension `_fast_path.c` goes straight to the
launch.

A version of PyTorch may lack the guard or change what it does, and the extension may not be built.
Then every call takes the general path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .allocation import Allocate, current_allocator
from .extension import extension
from .rows import PreparedLaunch
from .streams import current_device, several_devices

TensorCheck = Callable[..., bool]
FastPath = Callable[..., Any]


def make_fast_path(
    tensors: Sequence[Tensor | None], prepared: PreparedLaunch, alignment: int,
    result: Callable[..., Any],
) -> FastPath | None:
    """Make the fast path of calls whose tensors have the layouts of these tensors.

    The fast path takes the tensors (None for each one that is None here) and the scalars. It
    returns the outputs: one as it is, several as a named tuple. It returns None, and the caller
    takes the general path, if an argument is no tensor, or a tensor has another layout, is not
    aligned, or needs a gradient.

    Args:
        tensors: One per input; None for one that is left out.
        prepared: The prepared launch of the call.
        alignment: Required alignment of every tensor's address, bytes; a power of two.
        result: The named tuple of the outputs; ignored where there is one output.
    Returns:
        None if this process has no guard or no extension.
    """
    module = extension("_fast_path")
    check = tensor_check([tensor for tensor in tensors if tensor is not None])
    if module is None or check is None:
        return None
    launches, scratch, scalars = prepared.record()
    path: FastPath = module.FastPath(
        check, tuple(tensor is not None for tensor in tensors), launches, scalars, prepared.stream,
        prepared.device, current_device if several_devices(prepared.device) else None,
        tuple(None if make is None else _made_like(make()) for make in prepared.outputs),
        scratch, Tensor.data_ptr, torch.is_grad_enabled, alignment,
        result if isinstance(result, type) else tuple,
    )
    return path


def _made_like(output: Tensor) -> Allocate:
    """An allocator of outputs like this one; the fast path checks that its device is current."""
    return current_allocator(tuple(output.shape), output.stride(), output.dtype, output.device)


def tensor_check(tensors: Sequence[Tensor]) -> TensorCheck | None:
    """Return a function that checks whether tensors have the layouts of these tensors.

    The function takes as many arguments, of any kind. It returns True if each is a tensor of the
    same Python type, dtype, device, shape, strides and negative bit, no two are the same object,
    and modes, transforms and autocast are as they are now. It does not compare addresses. Whether
    it compares `requires_grad` depends on the version of PyTorch.

    Returns:
        None if this PyTorch has no such guard.
    """
    make = _maker()
    return None if make is None else _check(make, tensors)


def _check(make: Callable[..., Any], tensors: Sequence[Tensor]) -> TensorCheck:
    # The guard takes None for a dynamic extent; these are all static.
    check: TensorCheck = make(
        *tensors, dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


@functools.cache
def _maker() -> Callable[..., Any] | None:
    """PyTorch's `TensorGuards`, if it behaves as `tensor_check` documents."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Callable[..., Any] | None = getattr(guards, "TensorGuards", None)
    if make is None:
        return None
    x, w = torch.empty(2, 4), torch.empty(4)
    others: tuple[tuple[object, object], ...] = (
        (torch.empty(3, 4), w), (torch.empty(2, 8)[:, ::2], w), (x.double(), w), (x.to("meta"), w),
        (x, torch.nn.Parameter(w)), (x, None), (3, w), (torch._neg_view(x), w),
    )
    try:
        check = _check(make, (x, w))
        good = check(x, w) and check(torch.empty(2, 4), w) and not any(
            check(*other) for other in others
        )
        with torch.autocast("cpu", enabled=not torch.is_autocast_enabled("cpu")):
            good = good and not check(x, w)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return make if good else None
