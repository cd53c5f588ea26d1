"""Find the files of a library that nothing uses any more."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from kgen.emit.state import (
    read_safe,
    read_tables,
)
from kgen.runtime.families import TEMPLATES

RUNTIME_SUFFIXES = (".py", ".c")
# Folder of the library -> the package of kgen that is copied there.
COPIED = {"_runtime": "runtime", "compat": "compat", "nn": "nn"}
_TEMPLATE = re.compile(r'^\s*template="([^"]+)",$', re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def unreferenced_kernels(folder: Path) -> list[Path]:
    """Kernel files of an operator that neither a table nor a safe row names."""
    named = {row.kernel for table in read_tables(folder / "tables").values() for row in table.rows}
    named |= {row.kernel for row in read_safe(folder / "safe.yaml")}
    return sorted(
        path for path in (folder / "kernels").glob("*")
        if path.suffix in (".cu", ".cubin") and path.name.partition(".")[0] not in named
    )


def old_modules(library: Path, today: Collection[Path]) -> list[Path]:
    """Files of the runtime, the adapters and the modules that the current kgen does not write.

    Args:
        library: The package's folder.
        today: The files that the current kgen writes.
    """
    return sorted(
        path for folder in COPIED for path in (library / folder).glob("*")
        if path.suffix in RUNTIME_SUFFIXES and path not in today
    )


def old_templates(library: Path) -> list[Path]:
    """Templates that no family names."""
    named = {name for path in library.glob("*/families.py")
             for name in _TEMPLATE.findall(path.read_text(encoding="utf-8"))}
    root = library / TEMPLATES
    return sorted(path for path in root.rglob("*")
                  if path.is_file() and path.relative_to(root).as_posix() not in named)


def old_headers(library: Path, include_dir: Path) -> list[Path]:
    """Headers that the device library no longer has and no kernel includes."""
    include = library / "_include"
    pending = [name for path in library.glob("*/kernels/*.cu")
               for name in _INCLUDE.findall(path.read_text(encoding="utf-8"))]
    needed: set[Path] = set()
    while pending:
        path = include / pending.pop()
        if path in needed or not path.is_file():
            continue
        needed.add(path)
        pending += [str(found) for name in _INCLUDE.findall(path.read_text(encoding="utf-8"))
                    for found in (Path(name), path.parent.relative_to(include) / name)]
    return sorted(
        path for path in include.rglob("*")
        if path.is_file() and path not in needed
        and not (include_dir / path.relative_to(include)).is_file()
    )
