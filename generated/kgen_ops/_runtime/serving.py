"""Check before a call whether the library serves it, and why not.

For callers that have another kernel for the calls that the library does not serve.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .argument_kinds import check_tensors
from .arguments import bind_arguments
from .dispatch import MAX_PREPARED, PLAIN_TENSORS, Dispatcher, DispatchError
from .problems import Explanation

_REASONS: dict[Any, str] = {}


def why_not(
    operator: str, pass_name: str, tensors: Sequence[Tensor | None], scalars: Sequence[float],
    flags: Sequence[bool | str] = (),
) -> str:
    """Say why the library does not serve a call, or serves it with the slow safe kernel on a GPU.

    The answer for a layout is cached. Nothing is compiled, loaded or launched.

    Args:
        operator: Name of an operator of the library.
        pass_name: `forward` or `backward`.
        tensors: One per input of the pass; None for one that is left out.
        scalars: One per scalar.
        flags: The choice of each of the signature's `flags`, then of each option.
    Returns:
        One line; empty if the library serves the call.
    """
    grad = torch.is_grad_enabled()
    layouts = tuple(
        (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad)
        if x is not None and type(x) in PLAIN_TENSORS and x.layout is torch.strided else type(x)
        for x in tensors
    )
    key = (operator, pass_name, layouts, *scalars, *flags)
    if (known := _REASONS.get(key)) is not None:
        return known
    library = __name__.rsplit(".", maxsplit=2)[0]
    package = importlib.import_module(f"{library}.{operator}")
    dispatcher: Dispatcher = getattr(package, pass_name.upper())
    if len(_REASONS) >= MAX_PREPARED:
        _REASONS.clear()
    _REASONS[key] = found = _why_not(dispatcher, tensors, scalars, flags)
    return found


def _why_not(
    dispatcher: Dispatcher, tensors: Sequence[Tensor | None], scalars: Sequence[float],
    flags: Sequence[bool | str],
) -> str:
    name = dispatcher.signature.function
    try:
        check_tensors(dispatcher.signature, tensors)
        there = [x for x in tensors if x is not None]
        for x in there:
            if type(x) not in PLAIN_TENSORS or x.layout is not torch.strided:
                return f"{name}: an argument is a {type(x).__name__} of layout {x.layout}"
        device = there[0].device
        if device.type != "cuda" and not (
                device.type == "cpu" and dispatcher.tables.tuned_for_host()):
            return f"{name}: the library was not tuned for {device.type}"
        if dispatcher.gradient is None and torch.is_grad_enabled() and any(
                x.requires_grad for x in there):
            return f"{name}: the library has no backward pass for it"
        bound = bind_arguments(dispatcher.signature, tensors, scalars, flags)
        return _slow(name, dispatcher.explain(bound.dims, bound.dtypes, device), device)
    except (TypeError, ValueError, DispatchError) as why:
        return str(why).partition("\n")[0]


def _slow(name: str, why: Explanation, device: torch.device) -> str:
    if device.type == "cuda" and why.step == "safe":
        return f"{name}: only the safe kernel, which is slow, serves {why.problem}"
    return ""
