"""A content-addressed file cache: a key covers all inputs of an entry, so an entry never changes.

An entry is one file, `<directory>/<k>/<key><suffix>` with k the key's first two characters: the
content, then a trailer with its length and a SHA-256 of its name and content. The trailer comes
last because ELF readers (the dynamic linker, the CUDA driver) ignore bytes after their data, so a
cached `.so` can be loaded in place. A file that does not match its trailer, or that has the name of
another entry, counts as missing and is removed.

A writer creates a temporary file and renames it over the entry. Any number of processes and threads
may therefore share a directory; if several build the same entry, the last one wins, with the same
content. There is no fsync: after a power cut the trailer shows a torn entry, and the compilation
is repeated.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT_VARIABLE = "KGEN_CACHE_DIR"

_MAGIC = b"kgencach"
_TRAILER_BYTES = len(_MAGIC) + 8 + 32
_TEMPORARY = "tmp"
_STALE_SECONDS = 24 * 3600.0
_NAME = re.compile(r"[A-Za-z0-9_]{3,128}")
_SUFFIX = re.compile(r"\.[A-Za-z0-9_.]{1,32}")


class CacheError(OSError):
    """The cache directory cannot be used or written."""

    def __str__(self) -> str:
        """The message without the error number, which is in `errno`."""
        return str(self.strerror)


def default_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return $KGEN_CACHE_DIR, or $XDG_CACHE_HOME/kgen, or ~/.cache/kgen."""
    env = os.environ if environment is None else environment
    if env.get(ENVIRONMENT_VARIABLE):
        return Path(env[ENVIRONMENT_VARIABLE]).expanduser()
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"]).expanduser() / "kgen"
    return Path("~/.cache/kgen").expanduser()


class Cache:
    """A directory of entries. Safe under concurrent threads and processes."""

    def __init__(self, directory: str | Path | None = None) -> None:
        """Open a cache; the directory is created (mode 0700) at the first `put`.

        Args:
            directory: Default: `default_directory()`.
        Raises:
            CacheError: If another user owns the directory or may write to it. Code loaded from it
                runs as this user.
        """
        self.directory = Path(directory) if directory is not None else default_directory()
        self._check_owner()

    def path(self, key: str, suffix: str) -> Path:
        """Return the path of an entry, whether it exists or not.

        Raises:
            ValueError: If key or suffix has characters that could leave the directory.
        """
        if not _NAME.fullmatch(key) or not _SUFFIX.fullmatch(suffix):
            raise ValueError(f"cache entry '{key}{suffix}': a key is 3 .. 128 letters and digits, "
                             "a suffix a dot and 1 .. 32 of them")
        return self.directory / key[:2] / f"{key}{suffix}"

    def get(self, key: str, suffix: str) -> bytes | None:
        """Return an entry's content, or None if it is missing, truncated or altered."""
        path = self.path(key, suffix)
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        content = _content(path.name, raw)
        if content is None:
            path.unlink(missing_ok=True)
        return content

    def put(self, key: str, suffix: str, content: bytes, executable: bool = False) -> Path:
        """Write an entry and return its path; readers see all of it or nothing.

        Raises:
            CacheError: If it cannot be written: no permission, disk full.
        """
        path = self.path(key, suffix)
        return self._write(path, content + _trailer(path.name, content),
                           0o700 if executable else 0o600)

    def keep(self, folder: str, name: str, content: bytes) -> Path:
        """Write a plain file `<directory>/<folder>/<name>` for people to read, atomically.

        Raises:
            CacheError: As in `put`.
        """
        return self._write(self.directory / folder / name, content, 0o600)

    def _write(self, path: Path, content: bytes, mode: int) -> Path:
        temporary = ""
        try:
            self._make(self.directory)
            self._make(path.parent)
            self._make(self.directory / _TEMPORARY)
            # In the same file system, so that the rename is atomic, but in a separate folder.
            handle, temporary = tempfile.mkstemp(dir=self.directory / _TEMPORARY)
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, mode)
                file.write(content)
            Path(temporary).replace(path)
            return path
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            raise CacheError(
                error.errno or 0,
                f"cannot write {path}: {error.strerror or error}\n"
                f"  next: free some space or permissions there, or set {ENVIRONMENT_VARIABLE}",
            ) from None

    def sweep(self, older_than_s: float = _STALE_SECONDS) -> int:
        """Remove temporary files that killed processes left; return their number."""
        removed = 0
        now = time.time()
        for path in (self.directory / _TEMPORARY).glob("*"):
            try:
                if now - path.stat().st_mtime > older_than_s:
                    path.unlink()
                    removed += 1
            except OSError:  # another process has removed it
                continue
        return removed

    def _make(self, directory: Path) -> None:
        if not directory.is_dir():
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_owner()

    def _check_owner(self) -> None:
        try:
            status = self.directory.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise CacheError(error.errno or 0, f"cannot use the cache directory {self.directory}: "
                             f"{error.strerror}\n  next: set {ENVIRONMENT_VARIABLE}") from None
        trouble = ""
        if not stat.S_ISDIR(status.st_mode):
            trouble = "is not a directory"
        elif status.st_uid != os.getuid():
            trouble = f"belongs to user {status.st_uid}, not to this one ({os.getuid()})"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            others = "every user" if status.st_mode & stat.S_IWOTH else "a group of users"
            trouble = f"may be written by {others} of this machine"
        if trouble:
            raise CacheError(0, f"refusing the cache directory {self.directory}: it {trouble}\n"
                             f"  next: set {ENVIRONMENT_VARIABLE} to a private directory, or "
                             "chmod 700 this one")


def read_file(path: str | Path) -> bytes:
    """Return the content of a file that may be a cache entry, without its trailer.

    Raises:
        OSError: If it cannot be read.
        CacheError: If it has a trailer that does not match.
    """
    raw = Path(path).read_bytes()
    if not _has_trailer(raw):
        return raw
    content = _content(Path(path).name, raw)
    if content is None:
        raise CacheError(0, f"{path} is damaged\n  next: delete it; it is built again")
    return content


def _trailer(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0" + content).digest()
    return _MAGIC + len(content).to_bytes(8, "little") + digest


def _has_trailer(raw: bytes) -> bool:
    start = len(raw) - _TRAILER_BYTES
    return start >= 0 and raw[start:start + len(_MAGIC)] == _MAGIC


def _content(name: str, raw: bytes) -> bytes | None:
    if not _has_trailer(raw):
        return None
    content = raw[:-_TRAILER_BYTES]
    return content if _trailer(name, content) == raw[-_TRAILER_BYTES:] else None
