"""Locate templates, search spaces and device headers in a checkout, a wheel or a user's folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.errors import CatalogueError

_PACKAGE = Path(__file__).resolve().parent
_SHOULD_HOLD = "it should hold operators/, templates/ and search_spaces/"


@dataclass(frozen=True, slots=True)
class Root:
    """A folder of operators.

    Attributes:
        operators: Folder of operator modules.
        templates: Folder of `<operator>/<pass>_<variant>.cu.jinja`.
        search_spaces: Folder of `<operator>.yaml`.
        builtin: Whether it is kgen's own folder.
    """

    operators: Path
    templates: Path
    search_spaces: Path
    builtin: bool

    @property
    def populations(self) -> Path:
        """Folder of the named populations, `<name>.yaml`."""
        return self.search_spaces / "populations"


def builtin_root() -> Root:
    """kgen's own operators: next to the package in a checkout, inside it in a wheel."""
    base = _data()
    return Root(_PACKAGE / "operators", base / "templates", base / "search_spaces", True)


def licence_file() -> Path:
    """kgen's licence, which a library also needs, because it contains kgen's runtime."""
    return _data() / "LICENSE"


def include_dir() -> Path:
    """The include path of `#include "kgen/primitives/core.cuh"`."""
    return builtin_root().templates / "include"


def gpu_dir() -> Path:
    """Folder of the GPU profiles, `<name>.yaml`."""
    return builtin_root().search_spaces / "gpus"


def user_roots(paths: Sequence[str | Path] = ()) -> list[Root]:
    """Folders given by `--path` (first) and by KGEN_PATH (separated like the entries of PATH).

    Raises:
        CatalogueError: If a path is no folder, or a folder without operators and populations.
    """
    from_environment = [p for p in os.environ.get("KGEN_PATH", "").split(os.pathsep) if p]
    roots = []
    for given, origin in [(p, "--path") for p in paths] + [
        (p, "KGEN_PATH") for p in from_environment
    ]:
        base = Path(given).expanduser().resolve()
        if not base.is_dir():
            raise CatalogueError(
                f"{origin}: '{given}' is not a folder\n"
                f"  {_SHOULD_HOLD}"
            )
        if not (base / "operators").is_dir() and not (base / "search_spaces").is_dir():
            raise CatalogueError(
                f"{origin}: '{given}' has neither operators/ nor search_spaces/\n"
                f"  {_SHOULD_HOLD}"
            )
        roots.append(Root(base / "operators", base / "templates", base / "search_spaces", False))
    return roots


def _data() -> Path:
    packed = _PACKAGE / "_data"
    return packed if packed.is_dir() else _PACKAGE.parent
