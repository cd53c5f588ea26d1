"""CUDA sources in which each condition has a line of its own.

A compiler's debug information tells the line of a comparison, and a line may have several. So a
source is spread before it is compiled to watch its comparisons. GCC gives the first operand of
`if (a && b)` the line of `if`, and the others those of `&&`: lines begin there. The source itself
travels inside the executable, as a zip archive behind its code: such a file is both an executable
and an archive.
"""

from __future__ import annotations

import io
import re
import zipfile
from dataclasses import dataclass

from kgen.model.whole_source import origins

SPREAD = "spread 2"
"""Version of `watched` and of whole sources, for keys of builds."""

_SOURCE = "source.cu"
_DIRECTIVE = r"(?m:^[ \t]*\#(?:[^\\\n]|\\\n|\\.)*)"
_TEXTS = r'//[^\n]*|/\*.*?\*/|R"(?P<end>\w*)\(.*?\)(?P=end)"|"(?:\\.|[^"\\\n])*"' \
         r"|\d[\w'.]*|'(?:\\.|[^'\\\n])*'"  # fmt: skip
_CONTROL = re.compile(r"\b(if|for|while|switch)\s*(constexpr\s*)?\($")
_TOKEN = re.compile(
    rf"(?P<whole>{_DIRECTIVE}|{_TEXTS}|::)|(?P<first>&&|\|\|)|(?P<last>[?:;{{}}(),])|.", re.DOTALL
)
_INLINE = re.compile(
    rf"(?P<whole>{_DIRECTIVE}|{_TEXTS})|\b(?:KGEN_DEVICE|inline|__forceinline__)\b", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A line of the spread source.

    Attributes:
        text: Its text.
        line: Number of the line of the source that it begins in.
        statement: Number of the first piece of its statement; the parentheses behind `if`, `for`
            and `while` count as a statement of their own.
    """

    text: str
    line: int
    statement: int


def spread(source: str) -> str:
    """Give each condition of a CUDA source a line of its own; the meaning stays the same."""
    return "\n".join(piece.text for piece in pieces(source))


def watched(source: str) -> str:
    """The spread source, with its functions declared so that their comparisons are watched.

    Those of the device library are not: a flag of the compiler excludes all that are `inline`.
    """
    return _INLINE.sub(lambda match: match["whole"] or "__inline", spread(source))


def pieces(source: str) -> list[Piece]:
    """The lines of the spread source."""
    found: list[Piece] = []
    text, line, begins = "", 1, 1  # of the piece; `begins`: the line that it begins in
    start, ended = 1, False  # of the statement
    is_control: list[bool] = []  # for each open parenthesis
    for token in _TOKEN.finditer(source):
        if ended and not token[0].isspace():
            start, ended = len(found) + 1, False
        mark = token["last"]
        if token["first"]:
            found.append(Piece(text, begins, start))
            text, begins = "", line
        if mark == "(":
            is_control.append(_CONTROL.search(text + "(") is not None)
            mark = None if is_control[-1] else mark
        ended = ended or mark in (";", "{", "}")
        if mark == ")" and is_control:
            ended = is_control.pop() or ended
        *whole, rest = token[0].split("\n")
        for part in whole:
            found.append(Piece(text + part, begins, start))
            text, line = "", line + 1
            begins = line
        text += rest
        if mark:
            found.append(Piece(text, begins, start))
            text = ""
    found.append(Piece(text, begins, start))
    return found


def in_source(text: str, file: str, source: str) -> str:
    """Replace line numbers of the spread source in a compiler's or sanitizer's message.

    Args:
        text: The message, with places such as `file:123` or `file:123:45`.
        file: Name of the file that was compiled.
        source: The source before it was spread; of a whole source, lines of headers get the
            header's name.
    """
    spread_lines, lines = pieces(source), origins(source)

    def place(match: re.Match[str]) -> str:
        piece = spread_lines[min(int(match[1]), len(spread_lines)) - 1]
        origin = lines[piece.line - 1]
        return f"{origin.file or file}:{origin.line}"

    return re.sub(rf"{re.escape(file)}:(\d+)(?::\d+)?", place, text)


def with_source(executable: bytes, source: str) -> bytes:
    """Add a kernel's source to an executable."""
    file = io.BytesIO()
    file.write(executable)
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        # The date is constant, so that equal builds have equal bytes.
        archive.writestr(zipfile.ZipInfo(_SOURCE), source)
    return file.getvalue()


def source_of(executable: bytes) -> str:
    """The source that `with_source` added; empty if there is none."""
    file = io.BytesIO(executable)
    if not zipfile.is_zipfile(file):
        return ""
    with zipfile.ZipFile(file) as archive:
        return archive.read(_SOURCE).decode()
