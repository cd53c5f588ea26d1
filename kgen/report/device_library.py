"""The reference of the device library, generated from the comments in its headers.

No C++ parser is needed because all headers have one form: a public declaration in namespace kgen
begins in column 0 (a public member after four spaces), directly after its comment.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.errors import CatalogueError

# Lower layers first. The host layer, which implements these folders on the CPU, is not listed.
FOLDERS = (
    "primitives", "rows", "recurrent", "chunked", "linear_attention", "wkv", "wkv4", "wkv7", "wkv6",
    "fft", "toeplitz",
)  # fmt: skip

_HEAD = """\
# Device library

The public functions and types of namespace `kgen`, by folder of `templates/include/kgen`. The
`README.md` of a folder says what it contains and what it may include.

This page is written by `kgen device-library --markdown docs/device-library.md`. Do not edit it.
"""
_START = re.compile(
    r"(?:template <(?!>)|(?:static )?(?:KGEN_DEVICE\b|constexpr )|explicit KGEN_DEVICE"
    r"|struct \w|class \w|enum class|using \w+ =)"
)
_TYPE = re.compile(r"^(?:template <[^;{]*> ?)?(?:struct|class) ", re.DOTALL)
# Declarations that the page omits: forward declarations, and specialisations of a template.
_SPECIAL = re.compile(
    r"^(?:template <[^;{]*> ?)?(?:struct|class) \w+(?:;$|<)|^[^=(]*constexpr \w+ \w+<", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A public declaration.

    Attributes:
        text: C++ text without a body; overloads that share a comment follow each other.
        comment: The comment before the declaration; empty if there is none.
        members: Public members that have a comment.
    """

    text: str
    comment: str
    members: tuple[Declaration, ...] = ()


def device_library_markdown(include: Path) -> str:
    """Return the page.

    Args:
        include: The folder that holds `kgen/primitives`.
    Raises:
        CatalogueError: If a folder of the library is missing.
    """
    lines = [_HEAD]
    for name in FOLDERS:
        folder = include / "kgen" / name
        if not folder.is_dir():
            raise CatalogueError(
                f"{folder} is missing\n  reinstall kgen: its headers are not whole"
            )
        lines.append(f"## {name}\n")
        for header in sorted(folder.glob("*.cuh")):
            lines += _page_of(f"kgen/{name}/{header.name}", header.read_text(encoding="utf-8"))
    return "\n".join(lines).rstrip() + "\n"


def _page_of(name: str, text: str) -> Iterator[str]:
    head, _, body = text.partition("#pragma once")
    yield f"### {name}\n"
    yield _uncommented(head.rstrip().splitlines()) + "\n"
    for declaration in declarations(body.splitlines()):
        yield from _entry(declaration)


def _entry(declaration: Declaration) -> Iterator[str]:
    yield f"```cpp\n{declaration.text}\n```\n"
    if declaration.comment:
        yield declaration.comment + "\n"
    for member in declaration.members:
        name = re.search(r"(operator\S*|\w+)\(", member.text)
        label = name[1] if name else member.text.split("=")[0].split()[-1].rstrip(";")
        said = " ".join(member.comment.split())
        yield textwrap.fill(f"- `{label}`: {said}", 118, subsequent_indent="  ")
    if declaration.members:
        yield ""


def declarations(lines: Sequence[str], indent: str = "") -> list[Declaration]:
    """Return the public declarations that begin at `indent`, in the order of the text."""
    found: list[Declaration] = []
    comment: list[str] = []
    hidden = ""  # the line that ends the part that is left out
    i = 0
    while i < len(lines):
        line = lines[i]
        if hidden:
            hidden = "" if line.startswith(hidden) else hidden
        elif line == "namespace detail {":
            hidden = "}  // namespace detail"
        elif line.startswith(f"{indent}// "):
            comment.append(line)
        elif line.startswith(indent) and _START.match(line, len(indent)):
            end = _end_of(lines, i)
            _add(found, lines[i : end + 1], comment, indent)
            comment, i = [], end
        elif line.startswith(f"{indent}template <>"):
            comment, i = [], _end_of(lines, i)
        elif line != f"{indent}//":
            comment = []
        else:
            comment.append(line)
        i += 1
    return found


def _end_of(lines: Sequence[str], start: int) -> int:
    """The last line of the declaration that begins at `start`, including its body."""
    depth = 0
    for i in range(start, len(lines)):
        code = re.sub(r'"[^"]*"|//.*', "", lines[i])
        depth += code.count("{") - code.count("}")
        if depth == 0 and code.rstrip().endswith((";", "}", "};")):
            return i
    return len(lines) - 1


def _add(found: list[Declaration], block: Sequence[str], comment: list[str], indent: str) -> None:
    whole = "\n".join(line.removeprefix(indent) for line in block)
    if _SPECIAL.match(whole) or "friend " in whole:
        return
    members: tuple[Declaration, ...] = ()
    if _TYPE.match(whole) and not indent:
        members = tuple(m for m in declarations(_public(block), "    ") if m.comment)
    text = _signature(whole)
    said = _uncommented([line.removeprefix(indent) for line in comment])
    if not said and found and _kind(found[-1].text) == _kind(text) != "":
        last = found[-1]
        found[-1] = Declaration(f"{last.text}\n{text}", last.comment, last.members)
    else:
        found.append(Declaration(text, said, members))


def _public(block: Sequence[str]) -> list[str]:
    """The public lines of a class or struct."""
    shown = not any(re.match(r"(?:template <.*> ?)?class ", line) for line in block[:4])
    lines = []
    for line in block[1:-1]:
        if line in ("public:", "private:"):
            shown = line == "public:"
        elif shown:
            lines.append(line)
    return lines


def _signature(text: str) -> str:
    """A declaration without its body, its initialisers and kgen's own attributes."""
    text = re.sub(r"\s*//[^\n]*", "", text)
    text = text.replace("KGEN_DEVICE ", "").replace("[[maybe_unused]] ", "")
    if text.startswith("enum class"):
        return text
    if _TYPE.match(text):
        return text.partition("{")[0].rstrip() + ";"
    if re.search(r"\)\s*(?:const\s*)?(?:->[^{]*)?(?::[^:{][^{]*)?\{", text):
        text = re.split(r"\)\s*(?:const\s*)?:[^:]", text, maxsplit=1)[0]
        text = text.partition("{")[0].rstrip() if "{" in text else text + ")"
        return text + ";"
    return text


def _kind(text: str) -> str:
    """The kind by which declarations share a comment: the name of overloads, or `using`."""
    if "using " in text:
        return "using"
    found = re.search(r"(operator\S*|\w+)\(", text)
    return found[1] if found else ""


def _uncommented(lines: Sequence[str]) -> str:
    return "\n".join(re.sub(r"^// ?", "", line) for line in lines).strip()
