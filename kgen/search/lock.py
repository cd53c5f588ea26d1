"""A lock on the study's file that a killed process cannot leave behind."""

from __future__ import annotations

import fcntl
import os
import threading

SUFFIX = ".flock"


class FileLock:
    """An advisory lock of the kernel, given back when its process ends in whatever way.

    What Optuna's `JournalFileBackend` takes as `lock_obj`: `acquire` and `release`.

    Optuna's own lock is a symbolic link. A tuner that is killed while it holds the link leaves it,
    and the next one waits: 30 seconds if the path was absolute, for ever if it was relative (seen:
    the link's target is then looked up beside the link, and its age never known).
    """

    def __init__(self, path: str) -> None:
        """Name the lock; the file is made when it is first acquired.

        Args:
            path: The file to be protected.
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
        """Give the lock back."""
        os.close(self._held.descriptor)
