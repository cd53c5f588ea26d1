"""Renders the safe kernels of an operator that has not been tuned on any GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kgen.build.render import Renderer
from kgen.catalogue import Entry
from kgen.emit.values import SafeKernel
from kgen.model.problem import Problem, with_dims

# The text of a safe kernel does not depend on the extents; rendering needs some.
_EXTENT = 64


def untuned_safe_kernels(entry: Entry, include_dir: Path) -> Iterator[SafeKernel]:
    """Render the safe variant for every pass and combination of dtypes and options.

    Args:
        entry: The operator with its space and templates.
        include_dir: Folder of the device headers.
    Raises:
        SpaceError: If a pass has no safe variant.
        RenderError: If a template does not render.
    """
    operator, renderer = entry.operator, Renderer(include_dir)
    signature = operator.signature
    extents = tuple((d.name, max(_EXTENT, d.smallest)) for d in signature.dims)
    for pass_ in signature.passes:
        variant = entry.space.safe_variant(pass_.name)
        assert variant.safe is not None  # `safe_variant` guarantees it
        for dtypes in signature.dtype_combinations():
            problem = with_dims(Problem(extents, tuple(dtypes.items())), {}, signature)
            rendered = renderer.render(
                operator.name, entry.templates, variant, variant.safe, problem)
            yield SafeKernel(operator, pass_.name, dtypes, variant, variant.safe, rendered)
