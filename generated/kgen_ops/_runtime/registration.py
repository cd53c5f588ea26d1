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
    refuse_grad: Callable[[list[torch.Tensor]], None],
) -> Any:
    """Register `kgen_ops::<name>`; it lives as long as the returned `torch.library.Library`.

    Args:
        schema: `rmsnorm(Tensor x, Tensor w, float eps=1e-6) -> Tensor`.
        implementation: For CUDA and CPU tensors.
        fake: Allocates the outputs without computing them.
        refuse_grad: Called with the tensors of a call that wants a gradient; raises.
    """
    name = schema.partition("(")[0]
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CUDA")
    library.impl(name, implementation, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)

    def without_gradient(*args: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            refuse_grad(tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.kgen_ops, name)(*args)

    library.impl(name, without_gradient, "Autograd")
    return library
