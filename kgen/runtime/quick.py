"""One look at all tensors of a call: are they like those of an earlier one?

To ask PyTorch for shape, strides, dtype and device of each tensor takes 0.5 us of host time per
tensor, and more to look the answers up. PyTorch's own compiler has a check that compares all of
them, and the state that sends calls through the dispatcher, with what they were once: 0.1 us per
call and 0.06 per tensor. Where a version of PyTorch lacks it, or it takes other arguments,
calls ask as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .rows import Prepared

Check = Callable[..., bool]
Checked = tuple[tuple[Check, Prepared], ...]


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
        with torch.autocast("cpu"):
            good = good and not check(x, w)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return make if good else None
