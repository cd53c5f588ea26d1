"""Render CUDA templates with Jinja2, in kgen and in the generated library alike.

Delimiters are chosen so that a template reads as CUDA: `${name}`, line statements `//% if`,
comments `/*# #*/` (Jinja's own `{{` and `{%` occur in CUDA initialisers and PTX).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import TemplateError

from .arith import MAX_POWER

__all__ = ["RENDER_ERRORS", "TemplateError", "Templates", "templates"]

# Limits per rendering, in loop iterations and characters; kernels have a few thousand lines.
_MAX_STEPS = 1_000_000
_MAX_TEXT = 4_000_000
_BLANK_LINES = re.compile(r"\n{3,}")
_FILTERS = ("abs", "join", "length", "list", "max", "min", "int", "string", "upper", "lower")

# Errors that invalid templates and undeclared names raise besides `jinja2.TemplateError`.
RENDER_ERRORS = (ArithmeticError, TypeError, ValueError, MemoryError, RecursionError)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox: templates cannot reach Python's objects, or use unlimited time or memory."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.globals = {"range": self.counted_range}
        self.steps = 0

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Evaluate an operator, with numbers only."""
        for operand in (left, right):
            if not isinstance(operand, int | float):
                raise jinja2.TemplateRuntimeError(f"{operand!r:.40} {operator}: no number")
        if operator == "**" and abs(right) > MAX_POWER:
            raise jinja2.TemplateRuntimeError(f"power {right} is beyond {MAX_POWER}")
        return super().call_binop(context, operator, left, right)

    def counted_range(self, *bounds: int) -> Iterator[int]:
        """`range`, with a limit on the iterations of all loops of a template together."""
        for value in range(*bounds):
            self.steps += 1
            if self.steps > _MAX_STEPS:
                raise jinja2.TemplateRuntimeError(f"loops of more than {_MAX_STEPS} steps")
            yield value


class Templates:
    """Renders templates; keeps parsed ones for its lifetime.

    Attributes:
        environment: Jinja's settings.
    """

    def __init__(self) -> None:
        self.environment = _Environment(
            variable_start_string="${",
            variable_end_string="}",
            block_start_string="/*%",
            block_end_string="%*/",
            comment_start_string="/*#",
            comment_end_string="#*/",
            line_statement_prefix="//%",
            undefined=jinja2.StrictUndefined,
            keep_trailing_newline=True,
            trim_blocks=True,
            autoescape=False,  # the output is CUDA, not HTML
        )
        self._parsed: dict[str, jinja2.Template] = {}

    def body(self, text: str, values: Mapping[str, str | int]) -> str:
        """Render a template.

        Args:
            text: The template.
            values: The values of every name that it uses.
        Raises:
            jinja2.TemplateError: If the template is not valid, or uses another name.
            ArithmeticError, TypeError, ValueError, MemoryError, RecursionError: If a statement of
                it fails.
        """
        if text not in self._parsed:
            self._parsed[text] = self.environment.from_string(text)
        self.environment.steps = 0
        parts: list[str] = []
        length = 0
        for part in self._parsed[text].generate(values):
            length += len(part)
            if length > _MAX_TEXT:
                raise jinja2.TemplateRuntimeError(f"more than {_MAX_TEXT} characters of source")
            parts.append(part)
        # Statements that render to nothing leave blank lines.
        return _BLANK_LINES.sub("\n\n", "".join(parts)).lstrip("\n")


@functools.cache
def templates() -> Templates:
    """Return the templates of this process."""
    return Templates()
