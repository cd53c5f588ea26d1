"""Write many files atomically, safe against concurrent tuners and a full disk."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kgen.errors import StorageError


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process, waiting for other processes. Creates the folder.

    The folder itself is locked, so that there is no lock file among the files that users commit.

    Raises:
        StorageError: If the folder cannot be created or locked.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as problem:
        raise _storage_error("open", folder, problem) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except BlockingIOError as problem:
        raise _storage_error("lock", folder, problem) from None
    finally:
        os.close(handle)  # closing also unlocks


def write_all(root: Path, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Write files under `root`, each by rename, and return those whose content changed.

    All files are written under temporary names first. If space or permission is missing, this fails
    before the first rename and leaves the folder unchanged.

    Raises:
        StorageError: If a file cannot be written.
    """
    staged: list[tuple[Path, Path]] = []
    target = root
    try:
        changed = []
        for name, content in files.items():
            target = root / name
            if _content(target) == content:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".kgen-")
            staged.append((Path(temporary), target))
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(temporary).chmod(0o644)
            changed.append(name)
        for temporary_path, target in staged:
            temporary_path.replace(target)
    except OSError as problem:
        for temporary_path, _ in staged:
            temporary_path.unlink(missing_ok=True)
        raise _storage_error("write", target, problem) from None
    return tuple(changed)


def remove(paths: list[Path]) -> None:
    """Delete files.

    Raises:
        StorageError: If one cannot be deleted.
    """
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as problem:
            raise _storage_error("delete", path, problem) from None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _storage_error(verb: str, path: Path, problem: OSError) -> StorageError:
    return StorageError(
        f"cannot {verb} {path}: {problem.strerror or problem}\n"
        "  the output is unchanged; free space or fix the permissions and run again, "
        "or choose another folder with --out"
    )
