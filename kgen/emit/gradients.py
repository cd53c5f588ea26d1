"""The generated lines that connect the two passes of an operator to autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kgen.catalogue import links_of
from kgen.emit.layout import fold, quoted
from kgen.operators.base import Operator


def gradient_values(operator: Operator) -> dict[str, Any] | None:
    """The values of `operator.py.jinja` for an operator's gradients; None if it has none.

    Raises:
        CatalogueError: If the passes do not fit together.
    """
    links = links_of(operator)
    if links is None:
        return None
    return {
        "incoming": _mapping("incoming", links.incoming),
        "saved": _mapping("saved", links.saved),
        "outgoing": _mapping("outgoing", links.outgoing),
        "dots": [", ".join(map(quoted, (dot.name, dot.gradient, dot.output, dot.beside)))
                 for dot in links.dots],
    }


def _mapping(name: str, pairs: Mapping[str, object]) -> str:
    items = [f"{quoted(key)}: {quoted(value)}" for key, value in pairs.items()]
    return fold(f"{name}={{", items, "},", 4)
