"""Lay out generated Python in lines of at most 100 columns."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Sequence

WIDTH = 100


def fold(head: str, items: Sequence[str], tail: str, indent: int = 0) -> str:
    """Return `head item, item tail` in one line if it fits, else the items filled below the head.

    The template has indented the first line; this indents the others.
    """
    line = f"{head}{', '.join(items)}{tail}"
    if indent + len(line) <= WIDTH:
        return line
    body = ",\n".join(_filled(items, " " * (indent + 4)))
    return f"{head}\n{body},\n{' ' * indent}{tail}"


def imported(head: str, names: Sequence[str]) -> str:
    """Return an import: in one line if it fits, else one name per line, as ruff's isort writes it.
    """
    line = head + ", ".join(names)
    if len(line) <= WIDTH:
        return line
    return f"{head}(\n" + "".join(f"    {name},\n" for name in names) + ")"


def _filled(items: Sequence[str], inner: str) -> list[str]:
    """Group items into lines, never breaking inside one."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 3 <= WIDTH:
            lines[-1] += f", {item}"
        else:
            lines.append(inner + item)
    return lines


def wrapped(text: str, indent: int, taken: int) -> str:
    """Return an expression, in parentheses over several lines if it would pass the width.

    Args:
        text: The expression.
        indent: Indent of the statement; lines after the first are indented by more.
        taken: Columns that the first line already uses after the indent.
    """
    if indent + taken + len(text) <= WIDTH:
        return text
    inner = " " * (indent + 4)
    body = textwrap.fill(text, width=WIDTH, initial_indent=inner, subsequent_indent=inner,
                         break_long_words=False, break_on_hyphens=False)
    broken = f"(\n{body}\n{' ' * indent})"
    # A line is not broken inside a string literal; it then stays long.
    return broken if _parses(broken) else text


def _parses(text: str) -> bool:
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True


def paragraph(text: str, indent: int = 0, hanging: int = 0) -> str:
    """Return text filled to the width; the first line is not indented."""
    margin = " " * indent
    filled = textwrap.fill(
        " ".join(text.split()), width=WIDTH, initial_indent=margin,
        subsequent_indent=margin + " " * hanging, break_long_words=False, break_on_hyphens=False,
    )
    return filled[indent:]


def docstring(text: str, indent: int) -> str:
    """Return a docstring of one sentence, over several lines if it is long."""
    line = f'"""{text}."""'
    if indent + len(line) <= WIDTH:
        return line
    margin = " " * indent
    filled = textwrap.fill(f'"""{text}.', width=WIDTH, initial_indent=margin,
                           subsequent_indent=margin, break_long_words=False,
                           break_on_hyphens=False)
    return f'{filled[indent:]}\n{margin}"""'


def quoted(value: object) -> str:
    """Return a Python literal with double quotes, as `ruff format` writes them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple | list):
        inner = ", ".join(map(quoted, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(k)}: {quoted(v)}" for k, v in value.items()) + "}"
    return repr(value)
