"""A CUDA source with the headers that have its kernel's code.

Most of a kernel's conditions are in headers of the device library. In the whole source the text of
such a header stands in place of its first `#include`. So its conditions get lines of their own, as
those of the source do (`kgen.model.spread_source`). Headers of primitives, which all kernels share,
stay included. A comment before each stretch of lines says which file it is from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHARED = ("kgen/primitives/", "kgen/host/")
_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]+["<](?P<name>kgen/[^">\n]+)[">]')
_MARK = re.compile(r"//@ (?P<file>\S*) (?P<line>\d+)")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a line of a whole source comes from.

    Attributes:
        file: The header, such as kgen/wkv/tensors.cuh; empty for the source itself.
        line: The number of the line there.
    """

    file: str
    line: int


def whole_source(source: str, include_dir: Path) -> str:
    """Put the text of a source's headers in place of their first `#include`.

    Args:
        source: The CUDA source. Its headers have `#pragma once` and no `#include` under `#if`.
        include_dir: The device library's folder.
    Raises:
        OSError: If a header cannot be read.
    """
    return "\n".join(_lines_of(source, "", include_dir, set()))


def _lines_of(text: str, file: str, include_dir: Path, seen: set[str]) -> Iterator[str]:
    yield f"//@ {file} 1"
    for number, line in enumerate(text.split("\n"), 1):
        include = _INCLUDE.match(line)
        if include is None or include["name"].startswith(_SHARED):
            yield "" if line.strip() == "#pragma once" else line
            continue
        name = include["name"]
        if name not in seen:
            seen.add(name)
            header = (include_dir / name).read_text(encoding="utf-8")
            yield from _lines_of(header, name, include_dir, seen)
        yield f"//@ {file} {number + 1}"


def origins(whole: str) -> list[Origin]:
    """The origin of each line of a whole source; also right for a source without its headers."""
    found: list[Origin] = []
    file, number = "", 1
    for line in whole.split("\n"):
        mark = _MARK.fullmatch(line)
        if mark is not None:
            file, number = mark["file"], int(mark["line"])
            found.append(Origin(file, number))  # of the comment, where nothing happens
            continue
        found.append(Origin(file, number))
        number += 1
    return found
