"""Connect the two passes of an operator to autograd.

A call that needs a gradient runs the forward pass inside a `torch.autograd.Function`, directly or
below PyTorch's dispatcher, and saves the tensors that the backward pass takes by name. Operators
are differentiable once: there are no kernels for second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .batching import Outputs, batched, servable
from .signature import ABSENT, Dot, PassSignature

PassFunction = Callable[..., Any]  # one pass: the arguments of its signature -> its outputs


class Gradient:
    """Connects the forward pass of an operator to its backward pass."""

    def __init__(
        self,
        forward: PassSignature,
        backward: PassSignature,
        run: PassFunction,
        incoming: Mapping[str, str],
        saved: Mapping[str, tuple[str, ...]],
        outgoing: Mapping[str, str],
        dots: Sequence[Dot] = (),
    ) -> None:
        """Connect two passes.

        Args:
            forward: Signature of the forward pass.
            backward: Signature of the backward pass.
            run: The public function of the backward pass.
            incoming: Input of the backward pass -> the output of the forward pass whose gradient it
                is. Other outputs are not differentiable.
            saved: Input of the backward pass -> inputs and outputs of the forward pass. The
                backward pass gets the first of them that is not None.
            outgoing: Input of the forward pass -> its gradient among the backward pass's outputs.
            dots: Inputs of the backward pass that are computed from gradients.
        """
        self.name = forward.function
        self._forward = forward
        self._run = run
        self._made = Outputs(forward)
        self._returned = Outputs(backward)
        inputs = [argument.name for argument in forward.inputs]
        outputs = [argument.name for argument in forward.outputs]
        # Positions of saved tensors among the inputs, then the outputs, of a call.
        slots = {name: index for index, name in enumerate((*inputs, *outputs))}
        self._count = len(inputs)
        self._saved = [[slots[name] for name in names] for names in saved.values()]
        self._dots = [(slots[dot.output], slots[dot.beside], dot) for dot in dots]
        self._plain = [slots[name] for name in outputs if name not in incoming.values()]
        # (argument of the backward pass, index of the output whose gradient it is).
        optional = {f.name for f in backward.dtypes if ABSENT in f.allowed}
        arguments = {argument.name: argument for argument in backward.inputs}
        self._incoming = [(arguments[name], outputs.index(output))
                          for name, output in incoming.items()]
        self._needed = [slots[output] for name, output in incoming.items()
                        if arguments[name].dtype not in optional]
        self._names = list(saved)
        self._wanted = list(arguments)
        self._rest = _positions(forward, backward)
        gradients = [argument.name for argument in backward.outputs]
        self._outgoing = [gradients.index(outgoing[name]) if name in outgoing else -1
                          for name in inputs]

    @cached_property
    def function(self) -> Any:
        """The `torch.autograd.Function`: apply(run, *arguments) -> tuple of outputs.

        `run` computes the outputs from the arguments of the forward pass.
        """
        return _function(self.name, {
            "forward": staticmethod(self._record),
            "backward": staticmethod(self._differentiate),
        })

    @cached_property
    def transformed(self) -> Any:
        """`function` for transforms of `torch.func`; a call takes more host time."""
        return _function(self.name, {
            "forward": staticmethod(_run),
            "setup_context": staticmethod(self._save),
            "backward": staticmethod(self._differentiate),
            "jvp": staticmethod(self._refuse_tangents),
            "vmap": staticmethod(self._batch),
        })

    def _record(self, ctx: Any, run: PassFunction, *arguments: Any) -> tuple[Tensor, ...]:
        outputs = _run(run, *arguments)
        self._save(ctx, (run, *arguments), outputs)
        return outputs

    def _save(self, ctx: Any, inputs: Sequence[Any], outputs: tuple[Tensor, ...]) -> None:
        """Save the tensors and numbers that the backward pass needs."""
        arguments = inputs[1:]
        made = self._made.present(arguments)
        slots = [*arguments[: self._count], *[None] * len(self._forward.outputs)]
        for index, tensor in zip(made, outputs, strict=True):
            slots[self._count + index] = tensor
        saved = [slots[places[0]] if len(places) == 1 else _first(slots, places)
                 for places in self._saved]
        for output, beside, _ in self._dots:
            saved.append(None if slots[beside] is None else slots[output])
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)  # None as the gradient of an unused output
        if plain := [slots[place] for place in self._plain if slots[place] is not None]:
            ctx.mark_non_differentiable(*plain)
        ctx.made = made
        ctx.needed = [(slots[place].shape, slots[place].dtype) for place in self._needed]
        ctx.rest = [arguments[place] for place in self._rest]

    def _refuse_tangents(self, ctx: Any, *tangents: object) -> NoReturn:
        raise NotImplementedError(
            f"{self.name}: a forward-mode gradient was requested (jvp, jacfwd, hessian), and the "
            "operator has none\n  next: take the gradient in reverse mode: torch.func.grad, vjp or "
            "jacrev"
        )

    def _batch(
        self, info: Any, mapped: Sequence[int | None], run: PassFunction, *arguments: Any
    ) -> Any:
        """Serve a call under `torch.func.vmap` so that outer transforms can differentiate it."""
        outputs = batched(
            self._forward, lambda *single: self.transformed.apply(run, *single), info.batch_size,
            mapped[1 : 1 + self._count], arguments,
        )
        return tuple(outputs), (0,) * len(outputs)

    def _differentiate(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the backward pass."""
        wanted = self._gather(ctx, gradients)
        again = torch.is_grad_enabled()  # create_graph=True
        if again:
            with torch.no_grad():
                found = self._run(*wanted, *ctx.rest)
        else:
            found = self._run(*wanted, *ctx.rest)
        tensors = (found,) if isinstance(found, Tensor) else tuple(found)
        if again:
            count = len(tensors)
            tensors = _Once.apply(self.name, count, *tensors, *wanted)  # type: ignore[no-untyped-call]
        there = dict(zip(self._returned.present((*wanted, *ctx.rest)), tensors, strict=True))
        given = [there.get(index) if needed else None
                 for index, needed in zip(self._outgoing, ctx.needs_input_grad[1:], strict=False)]
        return (None, *given, *[None] * (len(ctx.needs_input_grad) - 1 - len(given)))

    def _gather(self, ctx: Any, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The inputs of the backward pass, in declared order."""
        saved = ctx.saved_tensors
        given: dict[str, Tensor | None] = dict(zip(self._names, saved, strict=False))
        by_output = dict(zip(ctx.made, gradients, strict=True))
        for argument, index in self._incoming:
            gradient = by_output.get(index)
            place = self._count + index
            if gradient is None and place in self._needed:
                shape, dtype = ctx.needed[self._needed.index(place)]
                gradient = saved[0].new_zeros(shape, dtype=dtype)
            try:
                given[argument.name] = None if gradient is None else servable(argument, gradient)
            except RuntimeError:
                if gradient is None or gradient.layout is torch.strided:
                    raise
                given[argument.name] = servable(argument, gradient.to_dense())
        for (_, _, dot), output in zip(self._dots, saved[len(self._names):], strict=True):
            factor = given[dot.gradient]
            given[dot.name] = None if output is None or factor is None else (
                (factor.float() * output.float()).sum(-1).contiguous()
            )
        return [given.get(name) for name in self._wanted]


def _first(slots: Sequence[Tensor | None], places: Sequence[int]) -> Tensor | None:
    return next((slots[place] for place in places if slots[place] is not None), None)


def _function(name: str, members: dict[str, Any]) -> Any:
    """A subclass of `torch.autograd.Function`, named as PyTorch names its own nodes."""
    make: Any = type(torch.autograd.Function)
    title = "".join(part.capitalize() for part in name.split("_"))
    return make(title, (torch.autograd.Function,), members)


def _run(run: PassFunction, *arguments: Any) -> tuple[Tensor, ...]:
    found = run(*arguments)
    return (found,) if isinstance(found, Tensor) else tuple(found)


class _Once(torch.autograd.Function):
    """Returns gradients unchanged, and raises when a second derivative is taken.

    apply(name of the operator, number of gradients, *gradients, *inputs of the backward pass).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, count: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count] if tensor is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise NotImplementedError(_second(ctx.name))


def _second(name: str) -> str:
    return (
        f"{name}: a second derivative was requested; the library has kernels for the first only\n"
        "  next: leave create_graph=True out, or write this part of the loss in plain PyTorch"
    )


def refuse_grad(signature: PassSignature, arguments: Sequence[object], why: str) -> NoReturn:
    """Raise the error of a call that needs a gradient which the library does not have.

    Args:
        signature: The signature of the pass.
        arguments: The inputs, then the other arguments.
        why: The reason and the next step.
    Raises:
        NotImplementedError: Always.
    """
    wanting = [argument.name for argument, tensor in zip(signature.inputs, arguments, strict=False)
               if isinstance(tensor, Tensor) and tensor.requires_grad]
    raise NotImplementedError(
        f"{signature.function}: {' and '.join(wanting)} requires grad, but {why}\n  or call it "
        f"under torch.no_grad(), or pass {wanting[0]}.detach(), if no gradient is needed"
    )


def refuse_tangents(signature: PassSignature, tensors: Sequence[object]) -> None:
    """Raise an error if a tensor carries a forward-mode tangent, which a kernel would ignore.

    Args:
        signature: The signature of the pass.
        tensors: The inputs of the pass.
    Raises:
        NotImplementedError: If a tensor carries a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for argument, tensor in zip(signature.inputs, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            continue
        if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
            raise NotImplementedError(
                f"{signature.function}: {argument.name} is a dual tensor, but the operator has no "
                "forward-mode gradient\n  take the gradient in reverse mode, or pass "
                f"torch.autograd.forward_ad.unpack_dual({argument.name}).primal"
            )


def _positions(forward: PassSignature, backward: PassSignature) -> list[int]:
    """Positions of the backward pass's scalars, flags and options in the forward's arguments."""
    def rest(signature: PassSignature) -> list[str]:
        return [*(scalar.name for scalar in signature.scalars), *signature.flags,
                *(option.name for option in signature.options)]

    names = rest(forward)
    return [len(forward.inputs) + names.index(name) for name in rest(backward)]
