"""The generated lines that tie the two passes of an operator together for autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kgen.emit.layout import fold, quoted
from kgen.errors import CatalogueError
from kgen.model.signature import Tensor
from kgen.operators.base import Operator


def gradient_values(operator: Operator) -> dict[str, Any]:
    """What `operator.py.jinja` needs to know of the gradients of an operator with both passes.

    Raises:
        CatalogueError: If an input of the backward pass is nothing that the forward pass has.
    """
    forward, backward = (operator.signature.pass_named(n) for n in ("forward", "backward"))
    declared = operator.gradients
    made = [t.name for t in forward.outputs]
    there = [*(t.name for t in forward.inputs), *made]
    computed = {dot.name for dot in declared.dots}
    incoming: dict[str, str] = {}
    saved: dict[str, tuple[str, ...]] = {}
    for tensor in backward.inputs:
        name = tensor.name
        if name in computed:
            continue
        output = next((o for o in made if name in _gradients_of(o)), "")
        if output and name not in there:
            incoming[name] = output
            continue
        saved[name] = declared.saved.get(name, (name,))
        _check(operator, f"backward input '{name}'", saved[name], there)
    names = [t.name for t in backward.outputs]
    outgoing = {t.name: declared.shared.get(t.name, _found(t, names)) for t in forward.inputs}
    for name, gradient in declared.shared.items():
        _check(operator, f"input '{name}'", (gradient,), names)
    for dot in declared.dots:
        _check(operator, f"backward input '{dot.name}'", (dot.output, dot.beside), made)
    rest = {*(s.name for s in forward.scalars), *(o.name for o in operator.signature.options)}
    _check(operator, "the backward pass's scalars", [s.name for s in backward.scalars],
           sorted(rest))
    return {
        "incoming": _mapping("incoming", incoming),
        "saved": _mapping("saved", saved),
        "outgoing": _mapping("outgoing", {n: g for n, g in outgoing.items() if g}),
        "dots": [", ".join(map(quoted, (dot.name, dot.gradient, dot.output, dot.beside)))
                 for dot in declared.dots],
    }


def _gradients_of(name: str) -> tuple[str, str]:
    return f"g{name}", f"d{name}"


def _found(tensor: Tensor, names: Sequence[str]) -> str:
    return next((name for name in names if name in _gradients_of(tensor.name)), "")


def _check(operator: Operator, what: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise CatalogueError(
            f"{operator.name}: for autograd, {what} stands for {', '.join(unknown)}, which the "
            f"other pass does not have\n  it has {', '.join(allowed)}; declare what is meant in "
            "the operator's `gradients`"
        )


def _mapping(name: str, pairs: Mapping[str, object]) -> str:
    items = [f"{quoted(key)}: {quoted(value)}" for key, value in pairs.items()]
    return fold(f"{name}={{", items, "},", 4)
