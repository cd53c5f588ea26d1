"""Check the files of a library against its list of SHA-256 sums.

`SHA256SUMS` in the library's folder lists every file that kgen wrote there, in the format of
`sha256sum -c`. The library compares kernels, headers and dispatch tables with the list when it
loads them, so importing the library stays cheap. The SHA-256 of the list itself is the content hash
of the library.

The check finds files that were edited, truncated, mixed with those of another library, or built for
another architecture. It does not protect against an attacker who can write to the folder: the
attacker can also write the list, and Python's bytecode is not on it.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from .rows import FORMAT

MANIFEST = "SHA256SUMS"
LEAST_TORCH = (2, 6)
# Files that are not on the list: reports of tunes, bytecode, built extensions.
_UNLISTED_FOLDERS = frozenset({"reports", "__pycache__"})
_UNLISTED_SUFFIXES = frozenset({".pyc", ".so", ".pyd"})
_ELF_CUDA = 190  # e_machine


class IntegrityError(RuntimeError):
    """A file differs from the one that kgen wrote, or is for another device or version."""


def listed_files(root: Path) -> Iterator[str]:
    """Yield the paths that the list must contain, relative to `root`, sorted."""
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.name.startswith(".") or _UNLISTED_FOLDERS & set(parts) or parts == (MANIFEST,):
            continue
        if path.suffix not in _UNLISTED_SUFFIXES and path.is_file():
            yield "/".join(parts)


def digest_of(parts: Iterable[bytes]) -> str:
    """Return a digest of parts in the given order; different parts give different digests."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()[:32]


def digest_of_files(files: Iterable[tuple[str, bytes]]) -> str:
    """Return a digest of paths and contents, in the given order."""
    return digest_of(part for name, content in files for part in (name.encode(), content))


def manifest_text(files: dict[str, bytes]) -> str:
    """Return the list of a library; `files` maps relative paths to content."""
    return "".join(f"{_sha256(files[name])}  {name}\n" for name in sorted(files))


def damages(root: Path) -> list[str]:
    """Compare every file of a library with its list; return one line per difference.

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
    """Return the SHA-256 of the library's list, the content hash of the library.

    Raises:
        IntegrityError: If there is no list.
    """
    return _sha256(_manifest(root)[0])


def checked_bytes(root: Path, path: Path) -> bytes:
    """Return the content of a file of the library after comparing it with the list.

    Args:
        root: The library's folder.
        path: Below `root`.
    Raises:
        IntegrityError: If the file differs, is missing, or is not on the list.
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
    """Import a module with a dispatch table or safe kernels after comparing it with the list.

    Args:
        package: The package of the operator: `kgen_ops.rmsnorm`.
        name: Name within the package: `tables.h200`, `safe`.
    Raises:
        IntegrityError: If the file differs from the list, or has another format than this library
            reads.
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
        raise _refused(path, f"is of format {found}, but this library reads format {FORMAT}; "
                             "another version of kgen wrote it")
    _modules[package, name] = module
    return module


def checked_cubin(root: Path, path: Path) -> bytes:
    """Return a shipped cubin after comparing it with the list and its name with its architecture.

    Raises:
        IntegrityError: If either comparison fails.
    """
    image = checked_bytes(root, path)
    named = path.suffixes[0].removeprefix(".")
    found = cubin_sm(image)
    if found is None:
        raise _refused(path, "is not a cubin")
    if str(found) != named.removeprefix("sm_").rstrip("af"):
        raise _refused(path, f"holds code for sm_{found}, not for {named}")
    return image


def cubin_sm(image: bytes) -> int | None:
    """Return ten times the compute capability in a cubin's header; None if it is not a cubin."""
    if len(image) < 52 or image[:4] != b"\x7fELF":
        return None
    if int.from_bytes(image[18:20], "little") != _ELF_CUDA:
        return None
    flags = int.from_bytes(image[48:52], "little")
    # Since version 8 of the format, that of CUDA 13, the field is one byte higher.
    return (flags >> 8 if image[8] >= 8 else flags) & 0xFF


_modules: dict[tuple[str, str], ModuleType] = {}
_manifests: dict[Path, tuple[tuple[int, int], bytes, dict[str, str]]] = {}


def _manifest(root: Path, again: bool = False) -> tuple[bytes, dict[str, str]]:
    """The list's bytes and its sums by path, cached; `again` rereads the list if it has changed."""
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
    """The listed sum of a file. After a mismatch with `found`, the list is reread if it has
    changed.
    """
    return _manifest(root, again=found is not None)[1].get(name)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _refused(path: Path, trouble: str) -> IntegrityError:
    return IntegrityError(
        f"refusing {path}: it {trouble}\n"
        "  next: install the library again (pip install --force-reinstall), or run kgen emit in a "
        "working tree"
    )
