"""The files of a library that all operators share: runtime, headers, package, list of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import kgen
from kgen.assets import builtin_root, licence_file
from kgen.emit import python
from kgen.emit.functions import function_name
from kgen.emit.published import PACKAGE, tuned
from kgen.emit.state import read_tables
from kgen.emit.unused_files import COPIED, RUNTIME_SUFFIXES
from kgen.runtime.integrity import MANIFEST, listed_files, manifest_text

LICENCE = "LICENSE"
_HEADER_SUFFIXES = (".cuh", ".hpp", ".cpp", ".h")


def shared_files(include_dir: Path) -> dict[str, bytes]:
    """The copied files: licence, runtime, adapters, modules and device headers."""
    files: dict[str, bytes] = {f"{PACKAGE}/py.typed": b"",
                               f"{PACKAGE}/{LICENCE}": licence_file().read_bytes()}
    # Paths, because importing adapters and modules would import torch.
    kgen_folder = Path(kgen.__path__[0])
    for name, folder in COPIED.items():
        for path in sorted((kgen_folder / folder).iterdir()):
            if path.suffix in RUNTIME_SUFFIXES:
                files[f"{PACKAGE}/{name}/{path.name}"] = path.read_bytes()
    for path in sorted(include_dir.rglob("*")):
        if path.suffix in _HEADER_SUFFIXES:
            files[f"{PACKAGE}/_include/{path.relative_to(include_dir)}"] = path.read_bytes()
    return files


def package_files(root: Path) -> dict[str, bytes]:
    """The project file, its README, the package's own module and its self-test."""
    found = tuned(root / PACKAGE)
    functions = {
        name: [function_name(name, pass_name) for pass_name in passes]
        for name, (passes, _) in found.items()
    }
    gpus = {name: tables for name, (_, tables) in found.items()}
    own = {path.stem for path in builtin_root().operators.glob("*.py")}
    files = python.project_files(gpus, _example(root / PACKAGE, sorted(found)),
                                 only_own=own.issuperset(found))
    files[f"{PACKAGE}/__init__.py"] = python.package_module(functions)
    files[f"{PACKAGE}/selftest.py"] = python.selftest_module()
    return {path: text.encode() for path, text in files.items()}


def list_file(root: Path, coming: Mapping[str, bytes]) -> dict[str, bytes]:
    """The list of the library's files, including the files in `coming`, written together with it.
    """
    library = root / PACKAGE
    files = {name: (library / name).read_bytes() for name in listed_files(library)
             if f"{PACKAGE}/{name}" not in coming}
    files |= {name.removeprefix(f"{PACKAGE}/"): data for name, data in coming.items()}
    return {f"{PACKAGE}/{MANIFEST}": manifest_text(files).encode()}


def _example(library: Path, operators: Sequence[str]) -> str:
    """Arguments for `explain` in the README: the first measured row."""
    for name in operators:
        for table in read_tables(library / name / "tables").values():
            for row in table.rows:
                dims = ", ".join(f"{dim}={extent}" for dim, extent in row.dims)
                dtypes = ", ".join(f'{field}="{dtype}"' for field, dtype in row.dtypes)
                return f'"{name}", {dims}, {dtypes}'
    return '"<operator>", ...'
