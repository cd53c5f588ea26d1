"""What a library consists of, and the refusal to load anything else.

`SHA256SUMS` in the library's folder lists every file that kgen wrote there, in the form that
`sha256sum -c` reads. Kernels, headers and dispatch tables are compared with it when they are
loaded, and only then, so that importing the library stays cheap. The SHA-256 of the list itself is
the content hash of the library.

This finds files that were edited, cut off, mixed with those of another library, or built for
another architecture. It is no defence against someone who may write to the folder: they can write
the list, too, and Python's bytecode beside the tables is not on it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .rows import FORMAT

MANIFEST = "SHA256SUMS"
LEAST_TORCH = (2, 6)
# Not loaded by the library, or written by others: reports of tunes, bytecode, built extensions.
_UNLISTED_FOLDERS = frozenset({"reports", "__pycache__"})
_UNLISTED_SUFFIXES = frozenset({".pyc", ".so", ".pyd"})
_ELF_CUDA = 190  # e_machine


class IntegrityError(RuntimeError):
    """A file of the library is not what kgen wrote, or not for this device or version."""


def listed_files(root: Path) -> Iterator[str]:
    """Yield what a list of the library must name: paths relative to `root`, sorted."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.name.startswith(".") or _UNLISTED_FOLDERS & set(parts) or parts == (MANIFEST,):
            continue
        if path.suffix not in _UNLISTED_SUFFIXES and path.is_file():
            yield "/".join(parts)


def manifest_text(files: dict[str, bytes]) -> str:
    """Return the list of a library; `files` maps relative paths to content."""
    return "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))


def damages(root: Path) -> list[str]:
    """Compare every file of a library with its list; returns what is wrong, one line each.

    Raises:
        IntegrityError: If there is no list.
    """
    listed, found = _manifest(root)[1], dict.fromkeys(listed_files(root))
    trouble = [f"{name} is missing" for name in listed if name not in found]
    trouble += [f"{name} is not on the list" for name in found if name not in listed]
    trouble += [
        f"{name} was changed" for name in found
        if name in listed and _sha256((root / name).read_bytes()) != listed[name]
    ]
    return sorted(trouble)


def content_hash(root: Path) -> str:
    """Return the SHA-256 of the library's list, which stands for all that the library holds.

    Raises:
        IntegrityError: If there is no list.
    """
    return _sha256(_manifest(root)[0])


def checked_bytes(root: Path, path: Path) -> bytes:
    """Return the content of a file of the library, if it is what the list says.

    Args:
        root: The library's folder.
        path: Below `root`.
    Raises:
        IntegrityError: If it differs, or is missing, or is not on the list.
    """
    name = path.relative_to(root).as_posix()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    found, wanted = _sha256(content), _wanted(root, name, None)
    if found != wanted:
        wanted = _wanted(root, name, found)
    if wanted is None:
        raise _refused(path, f"is not on the list {MANIFEST} of this library")
    if found != wanted:
        raise _refused(path, f"was changed: its SHA-256 is {found[:12]}..., {MANIFEST} says "
                             f"{wanted[:12]}...")
    return content


def checked_module(package: str, name: str) -> ModuleType:
    """Import a module with a dispatch table or safe kernels, if it is what the list says.

    Args:
        package: Of the operator: `kgen_ops.rmsnorm`.
        name: Below it: `tables.h200`, `safe`.
    Raises:
        IntegrityError: If the file differs from the list, or is of another format than this
            library's runtime reads.
    """
    if (known := _modules.get((package, name))) is not None:
        return known
    folder = Path(importlib.import_module(package).__path__[0])
    path = folder.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    checked_bytes(folder.parent, path)
    module = importlib.import_module(f"{package}.{name}")
    found = getattr(module, "FORMAT", None)
    if found != FORMAT:
        raise _refused(path, f"is of format {found}, but this library reads format {FORMAT}: it "
                             "comes from another version of kgen")
    _modules[package, name] = module
    return module


def checked_cubin(root: Path, path: Path) -> bytes:
    """Return a shipped cubin, if it is what the list says and for the architecture it is named by.

    Raises:
        IntegrityError: If not.
    """
    image = checked_bytes(root, path)
    named = path.suffixes[0].removeprefix(".")
    found = cubin_sm(image)
    if found is None:
        raise _refused(path, "is no cubin")
    if str(found) != named.removeprefix("sm_").rstrip("af"):
        raise _refused(path, f"holds code for sm_{found}, not for {named}")
    return image


def cubin_sm(image: bytes) -> int | None:
    """Return the compute capability, times ten, that a cubin's header names; None if it is none."""
    if len(image) < 52 or image[:4] != b"\x7fELF":
        return None
    if int.from_bytes(image[18:20], "little") != _ELF_CUDA:
        return None
    flags = int.from_bytes(image[48:52], "little")
    # The field moved up by a byte with version 8 of the format, that of CUDA 13.
    return (flags >> 8 if image[8] >= 8 else flags) & 0xFF


_modules: dict[tuple[str, str], ModuleType] = {}
_manifests: dict[Path, tuple[tuple[int, int], bytes, dict[str, str]]] = {}


def _manifest(root: Path, again: bool = False) -> tuple[bytes, dict[str, str]]:
    """The list and what it says; read once, and once more if `again` and it has changed."""
    known = _manifests.get(root)
    if known is not None and not again:
        return known[1:]
    path = root / MANIFEST
    try:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        if known is not None and known[0] == stamp:
            return known[1:]
        text = path.read_bytes()
        sums = dict(line.split("  ", 1)[::-1] for line in text.decode().splitlines())
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read: {getattr(error, 'strerror', None) or error}"
                       ) from None
    _manifests[root] = (stamp, text, sums)
    return text, sums


def _wanted(root: Path, name: str, found: str | None) -> str | None:
    """What the list says of a file; after a mismatch (`found`) a list written since counts."""
    return _manifest(root, again=found is not None)[1].get(name)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _refused(path: Path, trouble: str) -> IntegrityError:
    return IntegrityError(
        f"refusing {path}: it {trouble}\n"
        "  next: install the library again (pip install --force-reinstall); of a working tree, "
        "kgen emit"
    )
