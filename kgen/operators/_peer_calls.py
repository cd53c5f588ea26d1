"""Makes peers from PyTorch functions: calls of the functions, or of their gradients by autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Scalars = Mapping[str, float]
    Peer = Callable[[Tensors, Scalars], object]
    Arguments = Callable[[Tensors, Scalars], tuple[object, ...]]


def applied(function: Callable[..., object], arguments: Arguments) -> Peer:
    """A peer that calls a function.

    Args:
        function: Computes the outputs.
        arguments: The function's arguments from a problem's inputs and scalars.
    """

    def peer(inputs: Tensors, scalars: Scalars) -> object:
        return function(*arguments(inputs, scalars))

    return peer


def differentiated(
    function: Callable[..., object], arguments: Arguments, leaves: Sequence[str],
    gradients: Sequence[str],
) -> Peer:
    """A peer that computes the gradients of a function by autograd.

    The function itself runs once per input set, outside of what is timed.

    Args:
        function: Computes the outputs; elements of a tuple that are None are left out.
        arguments: Returns the function's arguments from a problem's inputs and scalars.
        leaves: Inputs whose gradients are computed, in the operator's order; those that a problem
            lacks are left out. The first is always present.
        gradients: Names of the inputs that are gradients of the outputs, in the order of the
            outputs.
    """
    import torch

    # A compiled backward pass may otherwise reuse the saved tensors' memory, and run only once.
    torch._functorch.config.donated_buffer = False
    graphs: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def peer(inputs: Tensors, scalars: Scalars) -> object:
        key = inputs[leaves[0]].data_ptr()
        if key not in graphs:
            given = {n: inputs[n].detach().requires_grad_() for n in leaves if n in inputs}
            with torch.enable_grad():
                made = function(*arguments({**inputs, **given}, scalars))
            assert isinstance(made, tuple)
            graphs[key] = ([x for x in made if x is not None], list(given.values()))
        outputs, wanted = graphs[key]
        known = [inputs[name] for name in gradients if name in inputs]
        return torch.autograd.grad(
            outputs[: len(known)], wanted, known, retain_graph=True, allow_unused=True
        )

    return peer
