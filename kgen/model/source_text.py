"""Remove comments and blank space from C++ text."""

from __future__ import annotations

import re

# A literal is matched first: it may contain text that looks like a comment.
_TOKEN = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/|[ \t]+""",
    re.DOTALL,
)


def bare_text(text: str) -> str:
    """Return C++ source without comments, indentation and empty lines."""
    kept = _TOKEN.sub(lambda match: match["literal"] or " ", text)
    lines = (line.strip() for line in kept.splitlines())
    return "\n".join(line for line in lines if line)
