"""Package an emitted library as a wheel."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from kgen import __version__
from kgen.build import open_compiler
from kgen.emit import LICENCE, PACKAGE, Contents, read_contents, write_all
from kgen.errors import OptionError, RecordError, StorageError
from kgen.model.population import PopulationProblem
from kgen.package.cubins import KernelSource, check_arch, compile_cubins
from kgen.package.populations import family_kernels
from kgen.package.wheel import read_project, wheel_bytes, wheel_name
from kgen.runtime.integrity import MANIFEST, cubin_sm, manifest_text

_INCLUDE = "_include/"


@dataclass(frozen=True, slots=True)
class ArchCubins:
    """The cubins of one architecture.

    Attributes:
        arch: `sm_80`, `sm_90a`.
        kept: The cubins of the library.
        compiled: The cubins compiled for the wheel.
        families: Those of the compiled cubins that families give for a population.
        failed: Kernels of families that do not compile for the architecture; a call then uses the
            next kernel.
    """

    arch: str
    kept: int
    compiled: int
    families: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Packaged:
    """The result of packaging.

    Attributes:
        path: The wheel.
        size_bytes: Size of the wheel.
        version: Version of the wheel; it ends in the first digits of the content hash.
        content: SHA-256 of the list of all files of the library in the wheel.
        cubins: The cubins by architecture, in the requested order.
    """

    path: Path
    size_bytes: int
    version: str
    content: str
    cubins: tuple[ArchCubins, ...]


def package(
    library: Path, architectures: Sequence[str], wheel_dir: Path,
    on_start: Callable[[str, int], None] = lambda arch, count: None,
    population: Sequence[PopulationProblem] = (),
) -> Packaged:
    """Write a wheel of a library with sources, and cubins for some architectures.

    The same library, architectures and NVRTC give the same bytes. The library's cubins for these
    architectures are kept, because they were measured. Cubins of other architectures are left out.

    Args:
        library: Folder that `kgen tune` wrote, which holds `kgen_ops`.
        architectures: `sm_80`, `sm_90a`; empty: those that the library was tuned for.
        wheel_dir: Where the wheel is written; created if missing.
        on_start: Called with an architecture and the number of kernels to compile for it.
        population: Problems whose kernels are compiled for the wheel if a family gives them.
    Raises:
        CatalogueError, RecordError: If there is no library, or its files were changed.
        OptionError: If an architecture does not exist, or differs from the tuned one.
        ToolchainError: If NVRTC is missing, or does not support an architecture.
        BuildError: If a kernel does not compile for an architecture.
        StorageError: If something cannot be written.
    """
    for arch in architectures:
        check_arch(arch)
    contents = read_contents(library)
    _check_wheel_dir(wheel_dir)
    project = read_project(contents.project["pyproject.toml"], contents.project["README.md"])
    wanted = tuple(dict.fromkeys(architectures or contents.architectures))
    for arch in wanted:
        _check_measured(contents, arch)
    headers = {name.removeprefix(_INCLUDE): content for name, content in contents.files.items()
               if name.startswith(_INCLUDE)}
    files = {name: content for name, content in contents.files.items()
             if not name.endswith(".cubin")}
    counts = []
    with tempfile.TemporaryDirectory(prefix="kgen-") as folder:
        # A copy of the headers that were read before, because another process may emit meanwhile.
        write_all(Path(folder), headers)
        compiler = open_compiler("nvrtc", [folder])
        try:
            for arch in wanted:
                of_families = family_kernels(library, population, arch) if population else ()
                kept, missing = _shipped(contents, arch)
                on_start(arch, len(missing) + len(of_families))
                compiled = _named(missing, arch, compile_cubins(missing, arch, headers, compiler))
                ahead = _named(of_families, arch, compile_cubins(
                    of_families, arch, headers, compiler, skip_failures=True))
                files |= kept | compiled | ahead
                counts.append(ArchCubins(arch, len(kept), len(compiled) + len(ahead), len(ahead),
                                         len(of_families) - len(ahead)))
            nvrtc_version = compiler.version
        finally:
            compiler.close()
    listing = manifest_text(files).encode()
    content = sha256(listing).hexdigest()
    project = replace(project, version=f"{project.version}+sha{content[:12]}")
    build = {"kgen": __version__, "content": content, "architectures": wanted,
             "nvrtc": nvrtc_version}
    wheel = wheel_bytes(
        project,
        {f"{PACKAGE}/{name}": data for name, data in {**files, MANIFEST: listing}.items()},
        {"kgen.json": (json.dumps(build, indent=2) + "\n").encode()},
        f"kgen {__version__}",
        {f"{PACKAGE}/{LICENCE}": files[LICENCE]} if LICENCE in files else {},
    )
    name = wheel_name(project)
    write_all(wheel_dir, {name: wheel})
    return Packaged(wheel_dir / name, len(wheel), project.version, content, tuple(counts))


def _check_wheel_dir(folder: Path) -> None:
    """Check before anything is compiled that the folder of the wheel can be written.

    Raises:
        StorageError: If it cannot be created or written.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise StorageError(
            f"--wheel {folder}: a wheel cannot be written there: see {there}\n"
            "  next: --wheel DIR with a folder that you may write"
        )


def _check_measured(contents: Contents, arch: str) -> None:
    """Refuse another target for a tuned GPU: its code would not be the measured code.

    Raises:
        OptionError: If a GPU of this compute capability was tuned for another target.
    """
    capability = check_arch(arch)
    tuned = [own for own in contents.architectures if check_arch(own) == capability]
    if tuned and arch not in tuned:
        raise OptionError(
            f"--arch: '{arch}', but the kernels for GPUs of compute capability "
            f"{capability / 10:.1f} were tuned and verified as {tuned[0]}\n"
            f"  next: --arch {tuned[0]}"
        )


def _shipped(
    contents: Contents, arch: str
) -> tuple[dict[str, bytes], tuple[KernelSource, ...]]:
    """The library's cubins for an architecture, and the sources of kernels without a cubin."""
    kept: dict[str, bytes] = {}
    missing: list[KernelSource] = []
    for operator, stem in contents.kernels(check_arch(arch)):
        name = f"{operator}/kernels/{stem}"
        shipped = contents.files.get(f"{name}.{arch}.cubin")
        if shipped is not None:
            if cubin_sm(shipped) != check_arch(arch):
                raise RecordError(f"{name}.{arch}.cubin is no cubin for {arch}\n"
                                  "  next: tune its problem again")
            kept[f"{name}.{arch}.cubin"] = shipped
        else:
            missing.append(KernelSource(operator, stem, contents.files[f"{name}.cu"].decode()))
    return kept, tuple(missing)


def _named(
    kernels: Sequence[KernelSource], arch: str, images: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Cubins by file; operators may share a stem, but each operator has a file of its own."""
    return {f"{k.operator}/kernels/{k.stem}.{arch}.cubin": images[k.stem]
            for k in kernels if k.stem in images}
