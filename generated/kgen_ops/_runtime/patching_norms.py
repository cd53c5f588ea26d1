"""RMSNorm modules, recognised by a trial call; part of `patch`.

Published models have some 170 classes of RMSNorm, which differ in the name of eps, in a weight that
is stored minus 1, and in having no weight at all. So a trial determines what a module computes: its
own `forward` is compared with the formula, with a random weight, on rows whose mean square is near
eps and on larger ones. A module that computes anything else is left unchanged.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Attributes that hold eps in published classes.
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "variance_eps")
_ROWS = 4
# Tolerance by the module's dtype: the formula and the module round at different places.
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Norm(NamedTuple):
    """The formula of an RMSNorm module: x / sqrt(mean(x^2) + eps) * (offset + weight)."""

    eps: float
    offset: float
    has_weight: bool

    def __str__(self) -> str:
        weight = "" if self.has_weight else ", no weight"
        offset = f", offset={self.offset:g}" if self.offset else ""
        return f"rmsnorm(eps={self.eps:g}{offset}{weight})"


def forward_of(
    module: nn.Module, norm: Norm, rmsnorm: Callable[..., Any], on_cpu: bool
) -> Callable[..., Any]:
    """Make a method `forward` for a module that calls the library where it can.

    Args:
        module: The module.
        norm: The formula of the module.
        rmsnorm: The library's function.
        on_cpu: Whether the library serves CPU tensors.
    """
    own = type(module).forward

    def forward(self: nn.Module, x: Tensor, *arguments: Any, **options: Any) -> Any:
        weight = self.weight if norm.has_weight else None
        if (
            arguments or options or not (x.is_cuda or on_cpu)
            or (weight is not None and weight.dtype is not x.dtype)
            or x.dtype is torch.float64 or not x.numel()
        ):
            return own(self, x, *arguments, **options)
        return rmsnorm(x, weight, eps=norm.eps, offset=norm.offset)

    return forward


def found_out(module: nn.Module) -> Norm | str:
    """The formula of a module, or the reason why it is no RMSNorm that the library can serve."""
    if "forward" in module.__dict__:
        return "its forward was replaced before"
    weight = getattr(module, "weight", None)
    if weight is not None and (not isinstance(weight, Tensor) or weight.dim() != 1):
        return "its weight is no vector"
    if weight is not None and (weight.is_meta or weight.dtype not in _TOLERANCE):
        return f"its weight is on {weight.device} in {weight.dtype}"
    if isinstance(getattr(module, "bias", None), Tensor):
        return "it has a bias"
    if _required(module) != 1:
        return "its forward needs more than the input"
    known = [getattr(module, name) for name in _EPS_NAMES if hasattr(module, name)]
    epsilons = [float(eps) for eps in known if isinstance(eps, float | int) and eps > 0]
    if not epsilons and isinstance(module, nn.RMSNorm):
        # None: the machine epsilon of the dtype that PyTorch computes in
        is_double = weight is not None and weight.dtype is torch.float64
        epsilons = [torch.finfo(torch.float64 if is_double else torch.float32).eps]
    if not epsilons:
        return f"it has none of {', '.join(_EPS_NAMES)}"
    for eps in epsilons:
        found = _tried(module, weight, eps)
        if not isinstance(found, str):
            return found
    return found


def _required(module: nn.Module) -> int:
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(1 for p in parameters if p.default is p.empty and p.kind in (
        p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _tried(module: nn.Module, weight: Tensor | None, eps: float) -> Norm | str:
    """Compare a module's own forward with the formula on a few rows and a random weight."""
    dtype = torch.float32 if weight is None else weight.dtype
    device = torch.device("cpu") if weight is None else weight.device
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    width = _width(module, weight)
    # eps matters in the last two rows, and not in the first two.
    scale = torch.tensor([1.0, 1.0, eps**0.5, eps**0.5])[:, None]
    rows = (random(_ROWS, width) * scale).to(device, dtype)
    # A random weight, because with the module's own, which may be all ones, a forward that ignores
    # the weight would pass.
    other = None if weight is None else random(width).to(device, dtype)
    try:
        with torch.no_grad():
            given = type(module).forward(_with_weight(module, other), rows)
    except (RuntimeError, TypeError, ValueError, AssertionError) as trouble:
        return f"its forward failed in a trial: {str(trouble).splitlines()[0]:.80}"
    if not isinstance(given, Tensor) or given.shape != rows.shape or given.dtype is not dtype:
        return "its forward does not return one tensor like the input"
    exact = rows.double()
    normal = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    choices = [(Norm(eps, 0.0, False), normal)]
    if other is not None:
        choices = [(Norm(eps, offset, True), normal * (offset + other.double()))
                   for offset in (0.0, 1.0)]
    for norm, wanted in choices:
        error = (given.double() - wanted).abs().amax() / wanted.abs().amax()
        if error <= _TOLERANCE[dtype]:
            return norm
    return "a trial shows that it computes something else than RMSNorm"


def _with_weight(module: nn.Module, weight: Tensor | None) -> nn.Module:
    """A copy of a module with another weight, without its hooks; the module stays as it is."""
    twin = copy.copy(module)
    if weight is not None:
        twin.__dict__["_parameters"] = {
            name: old for name, old in module._parameters.items() if name != "weight"}
        twin.__dict__["_buffers"] = {
            name: old for name, old in module._buffers.items() if name != "weight"}
        twin.__dict__["weight"] = weight
    return twin


def _width(module: nn.Module, weight: Tensor | None) -> int:
    if weight is not None:
        return weight.numel()
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if isinstance(shape, tuple) and len(shape) == 1 else 64
