"""The study's file as Optuna sees it, with failures in kgen's words."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kgen.errors import StorageError


class StudyFile:
    """What Optuna's `JournalStorage` takes as a backend, around Optuna's own."""

    def __init__(self, path: str, backend: Any) -> None:
        """Wrap a `JournalFileBackend` of that path."""
        self._path = path
        self._backend = backend

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records.

        Raises:
            StorageError: If they cannot be written. A line that was written in part is cut off
                when the study is opened next; it is a view, and the trials are in their journal.
        """
        try:
            self._backend.append_logs(logs)
        except OSError as problem:
            raise StorageError(
                f"{self._path}: the study cannot be written: {problem.strerror}\n"
                "  free space or choose another --out; the trials written so far are kept"
            ) from None

    def read_logs(self, *arguments: Any) -> Generator[dict[str, Any], None, None]:
        """Read records; arguments and result are Optuna's own."""
        found: Generator[dict[str, Any], None, None] = self._backend.read_logs(*arguments)
        return found
