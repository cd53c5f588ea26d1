"""Operators as PyTorch's dispatcher sees them: for torch.compile, fake tensors and modes.

The public functions take a direct way past the dispatcher; what is registered here serves every
call that cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "kgen_ops"


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    refuse_grad: Callable[[tuple[Any, ...]], None],
) -> Any:
    """Register `kgen_ops::<name>`; it lives as long as the returned `torch.library.Library`.

    Args:
        schema: `rmsnorm(Tensor x, Tensor w, float eps=1e-6) -> Tensor`.
        implementation: For CUDA and CPU tensors.
        fake: Allocates the outputs without computing them.
        refuse_grad: Called with the arguments of a call that wants a gradient; raises.
    """
    name = schema.partition("(")[0]
    if schema.endswith("-> Tensor[]"):  # some outputs are optional, which schemas do not know
        implementation, fake = _listed(implementation), _listed(fake)
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CUDA")
    library.impl(name, implementation, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)

    def without_gradient(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        ):
            refuse_grad(args)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kgen_ops, name)(*args)

    library.impl(name, without_gradient, "Autograd")
    return library


def _listed(function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    def as_list(*args: Any) -> list[torch.Tensor]:
        found = function(*args)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    return as_list
