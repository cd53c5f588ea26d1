"""`torch.func.vmap` over operators: one launch where the mapped dim can join the batch.

It can where every output has the batch dim, and every mapped input too. Otherwise (a weight of
each element, the gradient of a weight for each element) there is a launch per element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import Signature
from .gradients import Outputs, servable


def batched(
    signature: Signature, run: Callable[..., Any], count: int, mapped: Sequence[int | None],
    arguments: Sequence[Any],
) -> list[Tensor]:
    """Serve a call with a mapped dim.

    Args:
        signature: Of the pass.
        run: Computes a call without one.
        count: Extent of the mapped dim.
        mapped: Of each input, its mapped dim or None.
        arguments: All of the call, in the order of the generated function.
    Returns:
        The outputs that there are, the mapped dim first.
    """
    outputs = Outputs(signature).present(arguments)
    batch = signature.outputs[0].dims[0]
    joins = {batch}
    packing = signature.packing
    offsets = None
    if packing is not None:
        offsets = arguments[[a.name for a in signature.inputs].index(packing.offsets)]
        joins |= {packing.sequences} if offsets is None else set()
    tensors, rest = arguments[: len(signature.inputs)], arguments[len(signature.inputs):]
    inputs = list(zip(signature.inputs, tensors, mapped, strict=True))
    if offsets is not None or any(output.dims[0] not in joins for output in outputs) or any(
        dim is not None and argument.dims[0] not in joins for argument, _, dim in inputs
    ):
        return _one_by_one(signature, run, count, mapped, arguments)
    joined: list[Tensor | None] = []
    for argument, tensor, dim in inputs:
        if tensor is None or argument.dims[0] not in joins:
            joined.append(tensor)
            continue
        first = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        joined.append(servable(argument, first if argument.leading else first.flatten(0, 1)))
    return [made if output.leading else made.view(count, made.shape[0] // count, *made.shape[1:])
            for output, made in zip(outputs, _listed(run(*joined, *rest)), strict=True)]


def _one_by_one(
    signature: Signature, run: Callable[..., Any], count: int, mapped: Sequence[int | None],
    arguments: Sequence[Any],
) -> list[Tensor]:
    rest = arguments[len(signature.inputs):]
    made = []
    for index in range(count):
        tensors = [
            tensor if dim is None else servable(argument, tensor.select(dim, index))
            for argument, tensor, dim in zip(signature.inputs, arguments, mapped, strict=False)
        ]
        made.append(_listed(run(*tensors, *rest)))
    return [torch.stack(parts) for parts in zip(*made, strict=True)]


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)
