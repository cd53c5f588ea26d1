"""Remove comments and blank space from C++ text."""

from __future__ import annotations

import re

# A literal is matched first: it may contain text that looks like a comment.
_LITERAL_OR_COMMENT = re.compile(
    r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/)""", re.DOTALL
)
_BLANKS = re.compile(r"[ \t]+")


def bare_text(text: str) -> str:
    """Return C++ source without comments, indentation and empty lines."""
    # `split` returns code and literals or comments in turn. One substitution cleans each piece of
    # code, because a search calls this function for every config.
    pieces = _LITERAL_OR_COMMENT.split(text)
    pieces[::2] = [_BLANKS.sub(" ", code) for code in pieces[::2]]
    pieces[1::2] = [" " if token[0] == "/" else token for token in pieces[1::2]]
    lines = (line.strip() for line in "".join(pieces).splitlines())
    return "\n".join(line for line in lines if line)
