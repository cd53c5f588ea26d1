"""Match the tensors of an operator's two passes, for autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kgen.errors import CatalogueError
from kgen.operators.base import Operator
from kgen.runtime.signature import Dot


@dataclass(frozen=True)
class Links:
    """The connections between the two passes of an operator.

    Attributes:
        incoming: Backward input -> the forward output whose gradient it is.
        saved: Backward input -> forward tensors; autograd passes the first one that is present.
        outgoing: Forward input -> the backward output that is the gradient of the input.
        dots: Backward inputs that are computed from gradients.
    """

    incoming: Mapping[str, str]
    saved: Mapping[str, tuple[str, ...]]
    outgoing: Mapping[str, str]
    dots: tuple[Dot, ...]


def links_of(operator: Operator) -> Links | None:
    """Match the passes of an operator; None if it does not have both passes.

    Raises:
        CatalogueError: If autograd cannot supply a tensor or scalar of the backward pass.
    """
    passes = {passed.name: passed for passed in operator.signature.passes}
    if not {"forward", "backward"} <= set(passes):
        return None
    forward, backward, declared = passes["forward"], passes["backward"], operator.gradients
    made = [t.name for t in forward.outputs]
    there = [*(t.name for t in forward.inputs), *made]
    computed = {dot.name for dot in declared.dots}
    incoming: dict[str, str] = {}
    saved: dict[str, tuple[str, ...]] = {}
    for name in (t.name for t in backward.inputs if t.name not in computed):
        output = next((o for o in made if name in _gradients_of(o)), "")
        if output and name not in there:
            incoming[name] = output
        else:
            saved[name] = declared.saved.get(name, (name,))
            _check(operator, f"backward input '{name}'", saved[name], there)
    for dot in declared.dots:
        _check(operator, f"backward input '{dot.name}'", (dot.output, dot.beside), made)
        _check(operator, f"backward input '{dot.name}'", (dot.gradient,), list(incoming))
    names = [t.name for t in backward.outputs]
    outgoing: dict[str, str] = {}
    for tensor in forward.inputs:
        own = next((name for name in names if name in _gradients_of(tensor.name)), "")
        if gradient := declared.shared.get(tensor.name, own):
            outgoing[tensor.name] = gradient
            _check(operator, f"the gradient of '{tensor.name}'", (gradient,), names)
    given = [*(s.name for s in forward.scalars), *(o.name for o in operator.signature.options)]
    _check(operator, "a scalar of the backward pass", [s.name for s in backward.scalars], given)
    return Links(incoming, saved, outgoing, declared.dots)


def _gradients_of(name: str) -> tuple[str, str]:
    return f"g{name}", f"d{name}"


def _check(operator: Operator, what: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise CatalogueError(
            f"{operator.name}: {what} refers to {', '.join(unknown)}, which autograd does not "
            f"have\n  it has {', '.join(allowed) or 'none'}; declare it in the "
            "operator's `gradients`, see docs/tutorials/new-operator.md"
        )
