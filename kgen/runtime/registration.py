"""Register operators with PyTorch's dispatcher.

The public functions bypass the dispatcher. The registered operators serve the calls that cannot
bypass it: torch.compile, torch.export, fake tensors, modes, autocast and transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .autocast import promoted
from .batching import batched
from .dispatch import Dispatcher, transforms
from .gradients import refuse_tangents

NAMESPACE = "kgen_ops"


def register(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    served: Dispatcher,
) -> Any:
    """Register `kgen_ops::<name>`; it lives as long as the returned `torch.library.Library`.

    Args:
        schema: `rmsnorm(Tensor x, Tensor w, float eps=1e-6) -> Tensor`.
        implementation: For CUDA and CPU tensors.
        fake: Allocates the outputs without computing them.
        served: The dispatcher of the pass; its gradient may be set later.
    """
    _name_results(served)
    name = schema.partition("(")[0]
    result = schema.rpartition("-> ")[2]
    served.run = implementation
    if result == "Tensor[]":  # a schema cannot express optional outputs
        implementation, fake = _listed(implementation), _listed(fake)
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, implementation, "CUDA")
    library.impl(name, implementation, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    operator: Any = getattr(getattr(torch.ops, NAMESPACE), name)
    defaults = _defaults(served)
    count = len(served.signature.inputs)

    def packed(outputs: Sequence[torch.Tensor]) -> Any:
        if result == "Tensor":
            return outputs[0]
        return list(outputs) if result == "Tensor[]" else tuple(outputs)

    def complete(arguments: Sequence[Any]) -> tuple[Any, ...]:
        # PyTorch drops trailing arguments that equal their defaults.
        return (*arguments, *defaults[len(arguments):])

    def below_autograd(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    def with_autograd(*arguments: Any) -> Any:
        refuse_tangents(served.signature, complete(arguments)[:count])
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if served.gradient is not None and transforms():
                raise NotImplementedError(
                    f"torch.ops.{NAMESPACE}.{name} was called inside a transform of torch.func "
                    "that needs its gradient, which PyTorch supports only for its own operators\n"
                    f"  next: call {NAMESPACE}.{name}, and outside torch.compile"
                )
            return packed(served.recorded(below_autograd, complete(arguments)))
        return below_autograd(*arguments)

    def with_autocast(*arguments: Any) -> Any:
        tensors, rest = complete(arguments)[:count], complete(arguments)[count:]
        with torch._C._ExcludeDispatchKeyGuard(_autocast_keys()):
            return operator(*promoted(served.signature, tensors), *rest)

    def with_vmap(info: Any, mapped: Sequence[int | None], *arguments: Any) -> Any:
        dims = [*mapped[:count], *[None] * (count - len(mapped))]
        made = batched(served.signature, operator, info.batch_size, dims, complete(arguments))
        return packed(made), 0 if result == "Tensor" else packed([0] * len(made))  # type: ignore[list-item]

    library.impl(name, with_autograd, "Autograd")
    library.impl(name, with_autocast, "AutocastCUDA")
    library.impl(name, with_autocast, "AutocastCPU")
    torch.library.register_vmap(f"{NAMESPACE}::{name}", with_vmap, lib=library)
    return library


def _name_results(served: Dispatcher) -> None:
    """Let `torch.export.save` write the named tuples that an exported model returns.

    A PyTorch without this function can export named tuples, but refuses to save them.
    """
    serializable = getattr(torch.utils._pytree, "_register_namedtuple", None)
    for made in served.results.values():
        if serializable is not None and isinstance(made, type):
            serializable(made, serialized_type_name=f"{made.__module__}.{made.__qualname__}")


def _autocast_keys() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _defaults(served: Dispatcher) -> tuple[Any, ...]:
    """The default of each argument, in the order of the generated function."""
    signature = served.signature
    return (
        *[None] * len(signature.inputs), *(scalar.default for scalar in signature.scalars),
        *[False] * len(signature.flags), *(option.default for option in signature.options),
    )


def _listed(function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    def as_list(*args: Any) -> list[torch.Tensor]:
        found = function(*args)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    return as_list
