"""Peers of rmsnorm."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kgen.operators._peer_calls import applied, differentiated

if TYPE_CHECKING:
    import torch

    from kgen.operators._peer_calls import Peer, Scalars, Tensors


def peers(pass_name: str) -> dict[str, Peer]:
    """F.rms_norm, torch.compile of a model's code, and Liger's kernels if they are installed.

    A residual is added as in a model without a fused kernel. Backward: the gradients of the same
    functions by autograd. The forward pass runs once per input set, outside of the timed calls.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    def eager(
        x: torch.Tensor,
        w: torch.Tensor | None,
        added: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> object:
        h = x if added is None else x + added
        if w is not None:
            w = (w + offset if offset else w).to(x.dtype)
        y = F.rms_norm(h, (h.shape[-1],), w, eps)
        return y if added is None else (y, h)

    def model_code(
        x: torch.Tensor,
        w: torch.Tensor | None,
        added: torch.Tensor | None,
        eps: float,
        offset: float,
    ) -> object:
        h = x if added is None else x + added
        wide = h.float()
        y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        if w is not None:
            y = y * (offset + w.float())
        return y.to(x.dtype) if added is None else (y.to(x.dtype), h)

    # After a number of recompilations Dynamo silently runs a function eagerly. With many problems
    # in one process, the "compiled" peer would be timed as eager.
    torch._dynamo.reset()
    functions: dict[str, Callable[..., object]] = {
        "eager": eager,
        "torch.compile": torch.compile(model_code, dynamic=False),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
        functions["liger"] = _liger
    if pass_name == "forward":
        return {name: applied(function, _arguments) for name, function in functions.items()}
    return {
        name: differentiated(partial(_as_tuple, function), _of_gradients, ("x", "w"), ("dy", "dh"))
        for name, function in functions.items()
    }


def _liger(
    x: torch.Tensor, w: torch.Tensor, added: torch.Tensor | None, eps: float, offset: float
) -> object:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Not in place: that would overwrite dy, which later timed calls need.
    if added is None:
        return LigerRMSNormFunction.apply(x, w, eps, offset, "llama", False)
    return LigerFusedAddRMSNormFunction.apply(x, added, w, eps, offset, "llama", False)


def _arguments(inputs: Tensors, scalars: Scalars) -> tuple[object, ...]:
    return (
        inputs["x"], inputs.get("w"), inputs.get("residual"), scalars["eps"], scalars["offset"]
    )


def _of_gradients(inputs: Tensors, scalars: Scalars) -> tuple[object, ...]:
    """The arguments of a function whose gradients are computed.

    If h has a gradient, the function gets x as h and zeros as the residual.
    """
    import torch

    added = torch.zeros_like(inputs["x"]) if "dh" in inputs else None
    return (inputs["x"], inputs.get("w"), added, scalars["eps"], scalars["offset"])


def _as_tuple(function: Callable[..., object], *arguments: object) -> tuple[object, ...]:
    made = function(*arguments)
    return made if isinstance(made, tuple) else (made,)
