"""Strides of outputs that copy an input's order of dims in memory, without gaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_strides(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return strides without gaps that keep the order of dims in memory. The last is innermost.

    Args:
        sizes: Extents.
        strides: In elements; dims of equal stride are ordered as declared.
    """
    inner = len(sizes) - 1
    order = [inner, *sorted(range(inner - 1, -1, -1), key=lambda axis: strides[axis])]
    dense = [1] * len(sizes)
    step = 1
    for axis in order[: len(sizes)]:
        dense[axis] = step
        step *= max(sizes[axis], 1)
    return tuple(dense)


def dense_like(tensor: Tensor) -> Tensor:
    """Allocate a tensor of another's shape, dtype and device, with `dense_strides`."""
    strides = dense_strides(tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
