"""The operators, GPUs and rows of the library in a folder, read from its state files."""

from __future__ import annotations

from pathlib import Path

from kgen.emit.state import RowState, TableState, read_safe, read_table, read_tables
from kgen.errors import CatalogueError

PACKAGE = "kgen_ops"


def operator_names(root: Path) -> list[str]:
    """Return the operators of a library.

    Raises:
        CatalogueError: If there is no library in the folder.
    """
    names = [path.parent.name for path in sorted((root / PACKAGE).glob("*/safe.yaml"))]
    if not names:
        raise no_library(root, "--out")
    return names


def published_table(out_dir: str | Path, operator: str, gpu: str) -> TableState:
    """Read the rows and rules of an operator on a GPU.

    Raises:
        CatalogueError: If the operator was not tuned on the GPU.
        RecordError: If the file is not what kgen wrote.
    """
    path = Path(out_dir) / PACKAGE / operator / "tables" / f"{gpu}.yaml"
    if not path.exists():
        raise CatalogueError(f"{operator} was not tuned for {gpu}: there is no {path}\n"
                             f"  run: kgen tune --op {operator} --gpu {gpu}")
    return read_table(path)


def published_rows(out_dir: str | Path, operator: str, gpu: str) -> tuple[RowState, ...]:
    """Read the rows of an operator on a GPU; none if it has no table for the GPU.

    Raises:
        RecordError: If the file is not what kgen wrote.
    """
    path = Path(out_dir) / PACKAGE / operator / "tables" / f"{gpu}.yaml"
    return read_table(path).rows if path.exists() else ()


def no_library(root: Path, option: str) -> CatalogueError:
    """Return the error for a folder without a library; `option` is the option that named it."""
    return CatalogueError(f"there is no library in {root}: it has no {PACKAGE}/\n"
                          f"  kgen tune --out writes one; pass its folder with {option}")


def tuned(library: Path) -> dict[str, tuple[list[str], list[str]]]:
    """The operators of a library: name -> (passes, GPUs), from their state files."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for path in sorted(library.glob("*/safe.yaml")):
        tables = read_tables(path.parent / "tables")
        passes = dict.fromkeys(s.pass_name for s in read_safe(path))
        passes |= dict.fromkeys(row.pass_name for t in tables.values() for row in t.rows)
        found[path.parent.name] = (
            sorted(passes, key=lambda name: (name != "forward", name)),
            [gpu if not table.rows or any(row.is_measured for row in table.rows)
             else f"{gpu} (predicted)" for gpu, table in tables.items()],
        )
    return found
