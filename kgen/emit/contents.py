"""Read an emitted library: its files, and the kernels that a GPU of an architecture may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kgen.emit.files import locked
from kgen.emit.published import PACKAGE, no_library
from kgen.emit.state import read_safe, read_tables
from kgen.errors import RecordError
from kgen.runtime.integrity import MANIFEST, IntegrityError, damages, listed_files

_PROJECT_FILES = ("pyproject.toml", "README.md")


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a library when it was read.

    Attributes:
        files: The listed files by path below the package, without the list itself.
        project: `pyproject.toml` and `README.md`, next to the package.
        measured: Kernels that measured rows name: (operator, stem) -> compute capabilities of the
            rows' GPUs, times ten.
        safe: (operator, stem) of the safe kernels, which any GPU may call.
        architectures: The architectures of the tuned GPUs, without the host.
    """

    files: Mapping[str, bytes]
    project: Mapping[str, str]
    measured: Mapping[tuple[str, str], frozenset[int]]
    safe: frozenset[tuple[str, str]]
    architectures: tuple[str, ...]

    def kernels(self, compute_capability: int) -> tuple[tuple[str, str], ...]:
        """Return (operator, stem) of all kernels for a compute capability, sorted."""
        own = {kernel for kernel, found in self.measured.items() if compute_capability in found}
        return tuple(sorted(own | self.safe))


def read_contents(out_dir: str | Path) -> Contents:
    """Read an emitted library.

    Raises:
        CatalogueError: If the folder has no library.
        RecordError: If a file differs from the library's list.
    """
    root = Path(out_dir)
    library = root / PACKAGE
    if not (library / "__init__.py").is_file():
        raise no_library(root, "--from")
    with locked(root):
        try:
            trouble = damages(library)
        except IntegrityError as error:
            raise RecordError(str(error)) from None
        if trouble:
            shown = "\n  ".join(trouble[:8])
            raise RecordError(
                f"{library} was changed since kgen wrote it: {len(trouble)} files differ from "
                f"{MANIFEST}\n"
                f"  {shown}\n  restore them from version control, or accept them with kgen emit"
            )
        files = {name: (library / name).read_bytes() for name in listed_files(library)}
        project = {name: (root / name).read_text(encoding="utf-8") for name in _PROJECT_FILES}
        measured: dict[tuple[str, str], frozenset[int]] = {}
        safe: set[tuple[str, str]] = set()
        architectures: set[str] = set()
        for path in sorted(library.glob("*/safe.yaml")):
            operator = path.parent.name
            safe |= {(operator, row.kernel) for row in read_safe(path)}
            for table in read_tables(path.parent / "tables").values():
                if table.gpu.arch == "host":
                    continue
                architectures.add(table.gpu.arch)
                capability = dict(table.gpu.facts)["compute_capability"]
                for row in table.rows:
                    kernel = (operator, row.kernel)
                    measured[kernel] = measured.get(kernel, frozenset()) | {capability}
    return Contents(files, project, measured, frozenset(safe), tuple(sorted(architectures)))
