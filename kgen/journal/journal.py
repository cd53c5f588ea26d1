"""The journal: one JSON line per trial, appended with one write. No line is ever rewritten.

A process killed during a write leaves a partial line without a newline. The next append ends that
line, and reading skips it. Several processes may append to one journal: O_APPEND with a file lock
keeps lines whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kgen.errors import RecordError, StorageError
from kgen.journal.codec import FORMAT, record_from_dict, record_to_dict
from kgen.model.record import Record


class Journal:
    """The records of one operator on one GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped_lines = 0

    def append(self, record: Record) -> None:
        """Append a record and hand it to the operating system.

        Raises:
            StorageError: If it cannot be written (no permission, disk full).
        """
        line = json.dumps(record_to_dict(record), separators=(", ", ": ")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    line = "\n" + line  # end the partial line of a killed writer
                _write_whole(descriptor, line.encode(), size)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise StorageError(
                f"{self.path}: the trial journal cannot be written: {problem.strerror}\n"
                "  free space or choose another --out; the trials written so far are kept"
            ) from None

    def read(self) -> Iterator[Record]:
        """Yield all whole records, oldest first; counts damaged lines in `skipped_lines`.

        Raises:
            StorageError: If the file exists and cannot be read.
            RecordError: If a line is whole, but of a format that a newer kgen writes.
        """
        self.skipped_lines = 0
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as problem:
            raise StorageError(f"{self.path}: cannot be read: {problem.strerror}") from None
        for number, line in enumerate(raw.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                data = json.loads(line)
                record = record_from_dict(data)
            except (ValueError, RecordError):
                self._refuse_newer(number, line)
                self.skipped_lines += 1
            else:
                yield record

    def _refuse_newer(self, number: int, line: bytes) -> None:
        """Raise RecordError if an unreadable line is a record of a newer kgen."""
        try:
            found = json.loads(line)["format"]
        except (ValueError, KeyError, TypeError):
            return
        if isinstance(found, int) and found > FORMAT:
            raise RecordError(
                f"{self.path}:{number}: a record of format {found}; this kgen reads up to "
                f"{FORMAT}\n  next: use the kgen that wrote it, or a folder of its own: --out DIR"
            )


def _write_whole(descriptor: int, data: bytes, size_before: int) -> None:
    written = os.write(descriptor, data)
    if written != len(data):  # a full disk may accept a part of the line: remove it
        os.ftruncate(descriptor, size_before)
        raise OSError(28, "No space left on device")
