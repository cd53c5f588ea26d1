"""A journal file backend for Optuna that does not wait for the disk, and raises kgen's errors."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from kgen.errors import StorageError
from kgen.search.lock import FileLock


class StudyFile:
    """A backend of Optuna's `JournalStorage` that appends itself, and reads by Optuna's own.

    Optuna's backend calls `fsync` for every record: four times a trial, under the lock for which
    all processes of the study wait. Without it, what a process wrote outlives the process. Only a
    power cut can lose the newest records, and the trials are in kgen's journal too.
    """

    def __init__(self, path: str, backend: Any, lock: FileLock) -> None:
        """Wrap a `JournalFileBackend` of that path; `lock` protects the file."""
        self._path = path
        self._backend = backend
        self._lock = lock

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records.

        Raises:
            StorageError: If they cannot be written. The next `open_study` removes a line that was
                written in part; the trials themselves are in kgen's journal.
        """
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        try:
            self._lock.acquire()
            try:
                with open(self._path, "ab") as file:
                    file.write(text.encode())
            finally:
                self._lock.release()
        except OSError as problem:
            raise StorageError(
                f"{self._path}: the study cannot be written: {problem.strerror}\n"
                "  free space or choose another --out; the trials written so far are kept"
            ) from None

    def read_logs(self, *arguments: Any) -> Generator[dict[str, Any], None, None]:
        """Read records; see Optuna's `JournalFileBackend.read_logs`."""
        found: Generator[dict[str, Any], None, None] = self._backend.read_logs(*arguments)
        return found
