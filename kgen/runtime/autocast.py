"""Casts of inputs under autocast.

Under autocast some layers return half precision and others fp32. Inputs that must share a dtype are
cast to the widest among them, as PyTorch's own operators of the autocast list "promote" do. An
input with a dtype field of its own is cast to fp32 if no kernel supports its dtype. An input whose
dtype kernels support stays unchanged, so no cast ever narrows a tensor. In-out tensors are never
cast, because the call would then update the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from .arguments import TORCH_DTYPES
from .signature import ABSENT, PassSignature

any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def promoted(
    signature: PassSignature, tensors: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Cast the inputs of a pass to dtypes that it supports together.

    Returns the same tensor objects where no cast is needed.

    Args:
        signature: The signature of the pass.
        tensors: One per input; None for one that is left out.
    """
    main = signature.dtypes[0].name
    allowed = {f.name: set(f.allowed) - {ABSENT} for f in signature.dtypes}
    same = {name for name, dtypes in allowed.items() if name == main or dtypes == {main}}
    alike = [tensor.dtype for argument, tensor in zip(signature.inputs, tensors, strict=True)
             if argument.dtype in same and tensor is not None and _is_floating(tensor)]
    if not alike:
        return tuple(tensors)
    shared = reduce(torch.promote_types, alike)

    def cast(field: str, tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not _is_floating(tensor):
            return tensor
        if field in same:
            return tensor.to(shared)
        names = allowed.get(field, {field})
        dtypes = {shared if name == main else TORCH_DTYPES.get(name) for name in names}
        wide = torch.float32
        return tensor.to(wide) if tensor.dtype not in dtypes and wide in dtypes else tensor

    return tuple(tensor if argument.in_out else cast(argument.dtype, tensor)
                 for argument, tensor in zip(signature.inputs, tensors, strict=True))


def _is_floating(tensor: Tensor | None) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()
