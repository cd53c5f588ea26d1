"""`torch.func.vmap` over operators.

If every output and every mapped input has the batch dim, the mapped dim is folded into the batch
and one launch serves the call. Otherwise (a weight per element, the gradient of a weight per
element) there is one launch per element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .signature import ABSENT, Argument, PassSignature


class Outputs:
    """Determines which outputs a call of a pass has.

    An optional output is present if the input of the same dtype field is, or if its keyword is set.

    Attributes:
        optional: Indices of the optional outputs among the declared outputs.
    """

    def __init__(self, signature: PassSignature) -> None:
        inputs = [argument.dtype for argument in signature.inputs]
        fields = inputs + [""] * len(signature.scalars) + list(signature.flags)
        optional = {field.name for field in signature.dtypes if ABSENT in field.allowed}
        self._deciders = [
            (index, fields.index(output.dtype) if output.dtype in optional else -1)
            for index, output in enumerate(signature.outputs)
        ]
        self.optional = [index for index, decider in self._deciders if decider >= 0]

    def present(self, arguments: Sequence[Any]) -> list[int]:
        """Return the indices of the present outputs among the declared outputs.

        Args:
            arguments: All arguments of the call, in the order of the generated function.
        """
        return [index for index, decider in self._deciders
                if decider < 0 or _there(arguments[decider])]


def _there(argument: object) -> bool:
    """Whether a tensor argument is not None, or a keyword argument is true."""
    return argument is not None and (isinstance(argument, Tensor) or bool(argument))


def servable(argument: Argument, tensor: Tensor) -> Tensor:
    """The tensor in a layout that the argument allows. Autograd may pass an expanded scalar."""
    if argument.free_strides and argument.dims[-1] not in argument.free_strides:
        # All other strides are free, or belong to leading dims, for which the call makes a copy if
        # necessary.
        return tensor if tensor.ndim and tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.contiguous()


def batched(
    signature: PassSignature, run: Callable[..., Any], count: int, mapped: Sequence[int | None],
    arguments: Sequence[Any],
) -> list[Tensor]:
    """Serve a call with a mapped dim.

    Args:
        signature: The signature of the pass.
        run: Computes a call without a mapped dim.
        count: Extent of the mapped dim.
        mapped: For each input its mapped dim, or None.
        arguments: All arguments of the call, in the order of the generated function.
    Returns:
        The outputs that are present, the mapped dim first.
    Raises:
        NotImplementedError: If the pass updates an input.
    """
    if signature.in_outs:
        updated = signature.inputs[signature.in_outs[0]].name
        raise NotImplementedError(
            f"{signature.function}: it updates {updated} in place, which vmap cannot map\n"
            "  next: call it once, with all sequences in one batch"
        )
    outputs = [signature.outputs[index] for index in Outputs(signature).present(arguments)]
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
    signature: PassSignature, run: Callable[..., Any], count: int, mapped: Sequence[int | None],
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
