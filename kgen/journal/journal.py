"""One JSON line per trial, appended with one write; nothing is ever rewritten.

A line is complete or ignored: a process killed in mid-write leaves a tail without a newline,
which the next append first ends, and which reading skips. Several processes may append to one
journal: O_APPEND with a file lock keeps lines whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from kgen.errors import RecordError, StorageError
from kgen.journal.codec import record_from_dict, record_to_dict
from kgen.model.record import Record


class Journal:
    """The records of one operator on one GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped_lines = 0

    def append(self, record: Record) -> None:
        """Write a record; on return it is with the operating system.

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
                    line = "\n" + line  # end what a killed writer left
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
        """
        self.skipped_lines = 0
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as problem:
            raise StorageError(f"{self.path}: cannot be read: {problem.strerror}") from None
        for line in raw.splitlines():
            if not line.strip():
                continue
            try:
                yield record_from_dict(json.loads(line))
            except (ValueError, RecordError):
                self.skipped_lines += 1


def _write_whole(descriptor: int, data: bytes, size_before: int) -> None:
    written = os.write(descriptor, data)
    if written != len(data):  # a full disk may take a part of the line: take it back
        os.ftruncate(descriptor, size_before)
        raise OSError(28, "No space left on device")
