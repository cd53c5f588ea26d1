"""Calls like an earlier one, by one look at all tensors.

To ask PyTorch for shape, strides, dtype and device of each tensor takes 0.5 us of host time per
tensor, and more to look the answers up. PyTorch's own compiler has a check that compares all of
them, and the state that sends calls through the dispatcher, with what they were once: 0.1 us per
call and 0.06 per tensor. Behind it the extension `_ready.c` goes straight to the launch.

Where a version of PyTorch lacks the check, or its check does something else, or the extension was
not built, calls go on as the first one did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .allocation import Allocate, current_allocator
from .extension import extension
from .rows import Prepared
from .streams import current_device, several_devices

Check = Callable[..., bool]
Ready = Callable[..., Any]


def ready_call(
    tensors: Sequence[Tensor | None], prepared: Prepared, alignment: int
) -> Ready | None:
    """Return what serves calls whose tensors are like these.

    It is called with the tensors, None for those that are left out here, too, and the scalars. It
    returns the outputs, one as it is, several as a tuple; or None, if a tensor is of another kind,
    not aligned, or wants a gradient, or no tensor at all.

    Args:
        tensors: One per input; None for one that is left out.
        prepared: What the call needs.
        alignment: Of every tensor's address, bytes; a power of two.
    Returns:
        None if there can be no such thing in this process.
    """
    module = extension("_ready")
    check = tensor_check([tensor for tensor in tensors if tensor is not None])
    if module is None or check is None:
        return None
    launches, scratch, scalars = prepared.record()
    ready: Ready = module.Ready(
        check, tuple(tensor is not None for tensor in tensors), launches, scalars, prepared.stream,
        prepared.device, current_device if several_devices(prepared.device) else None,
        tuple(None if make is None else _made_like(make()) for make in prepared.outputs),
        scratch, Tensor.data_ptr, torch.is_grad_enabled, alignment,
    )
    return ready


def _made_like(output: Tensor) -> Allocate:
    """What allocates such outputs: whoever calls it has seen that the device is the current one."""
    return current_allocator(tuple(output.shape), output.stride(), output.dtype, output.device)


def tensor_check(tensors: Sequence[Tensor]) -> Check | None:
    """Return what says whether tensors are like these.

    It takes as many arguments of any kind, and is true if each is a tensor of the same Python type,
    dtype, device, shape and strides, if no two are the same object, and if modes, transforms and
    autocast are as they are now. It knows nothing of addresses, and whether gradients are wanted it
    may look at or not.

    Returns:
        None if this PyTorch has no such check.
    """
    make = _maker()
    return None if make is None else _check(make, tensors)


def _check(make: Callable[..., Any], tensors: Sequence[Tensor]) -> Check:
    # These extents: None in the place of one would stand for all.
    check: Check = make(
        *tensors, dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    ).check
    return check


@functools.cache
def _maker() -> Callable[..., Any] | None:
    """PyTorch's class, if it does what is said above."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    make: Callable[..., Any] | None = getattr(guards, "TensorGuards", None)
    if make is None:
        return None
    x, w = torch.empty(2, 4), torch.empty(4)
    others: tuple[tuple[object, object], ...] = (
        (torch.empty(3, 4), w), (torch.empty(2, 8)[:, ::2], w), (x.double(), w), (x.to("meta"), w),
        (x, torch.nn.Parameter(w)), (x, None), (3, w),
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
