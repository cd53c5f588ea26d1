"""Kernels in PyTorch, for tests of the verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def binding(
    kernel: Callable[[Tensors], None],
) -> Callable[[Tensors, Mapping[str, float]], Callable[[], None]]:
    """The function by which `verify` binds a kernel; the kernel gets scalars among its tensors."""

    def bind(tensors: Tensors, scalars: Mapping[str, float]) -> Callable[[], None]:
        given = {**tensors, **{name: torch.tensor(value) for name, value in scalars.items()}}
        return lambda: kernel(given)

    return bind


def factors(t: Tensors) -> Tensor:
    """The factors of rmsnorm's outputs in fp32: w + offset."""
    return t["w"].float() + t["offset"]
