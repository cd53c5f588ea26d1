"""A journal file backend for Optuna that raises kgen's errors."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from kgen.errors import StorageError


class StudyFile:
    """A backend of Optuna's `JournalStorage` that wraps Optuna's own."""

    def __init__(self, path: str, backend: Any) -> None:
        """Wrap a `JournalFileBackend` of that path."""
        self._path = path
        self._backend = backend

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records.

        Raises:
            StorageError: If they cannot be written. The next `open_study` removes a partial line;
                kgen's journal has the trials in any case.
        """
        try:
            self._backend.append_logs(logs)
        except OSError as problem:
            raise StorageError(
                f"{self._path}: the study cannot be written: {problem.strerror}\n"
                "  free space or choose another --out; the trials written so far are kept"
            ) from None

    def read_logs(self, *arguments: Any) -> Generator[dict[str, Any], None, None]:
        """Read records; see Optuna's `JournalFileBackend.read_logs`."""
        found: Generator[dict[str, Any], None, None] = self._backend.read_logs(*arguments)
        return found
