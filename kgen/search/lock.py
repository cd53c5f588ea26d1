"""A lock of the study's file that the kernel releases when its process ends."""

from __future__ import annotations

import fcntl
import os
import threading

SUFFIX = ".flock"


class FileLock:
    """An advisory file lock; the kernel releases it when the process ends for any reason.

    It has the methods that Optuna's `JournalFileBackend` expects of `lock_obj`. Optuna's own lock
    is a symbolic link. A tuner that is killed while it holds the link leaves it behind, and the
    next tuner waits 30 seconds if the path was absolute, and for ever if it was relative.
    """

    def __init__(self, path: str) -> None:
        """Create the lock; `acquire` makes the file.

        Args:
            path: The protected file.
        """
        self._path = path + SUFFIX
        self._held = threading.local()

    def acquire(self) -> bool:
        """Wait for the lock; returns True."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._held.descriptor = descriptor
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._held.descriptor)
