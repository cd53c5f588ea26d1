"""The journal: one JSON line per trial, appended with one write. No line is ever rewritten.

A process that is killed during a write leaves a partial line without a newline. The next append
ends that line, and reading skips it. Several processes may append to one journal: O_APPEND and a
file lock keep lines whole.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kgen.errors import RecordError, StorageError
from kgen.journal.codec import FORMAT, record_from_dict, record_to_dict
from kgen.model.record import Record


class Journal:
    """The records of one operator on one GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped_lines = 0

    def append(self, record: Record) -> str:
        """Append a record, hand it to the operating system, and return its line.

        Raises:
            StorageError: If it cannot be written (no permission, disk full).
        """
        line = json.dumps(record_to_dict(record), separators=(", ", ": "))
        self.append_lines(lambda descriptor: [line])
        return line

    def append_lines(self, choose: Callable[[int], Sequence[str]]) -> None:
        """Append lines with one write, under the lock of the file.

        Args:
            choose: Returns the lines. It gets the descriptor of the file, from which it may read.
        Raises:
            StorageError: If they cannot be written (no permission, disk full).
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                text = "".join(line + "\n" for line in choose(descriptor))
                size = os.fstat(descriptor).st_size
                if size and text and os.pread(descriptor, 1, size - 1) != b"\n":
                    text = "\n" + text  # end the partial line of a killed writer
                _write_whole(descriptor, text.encode(), size)
            finally:
                os.close(descriptor)
        except OSError as problem:
            raise StorageError(
                f"{self.path}: the trial journal cannot be written: {problem.strerror}\n"
                "  free space or choose another --out; the trials written so far are kept"
            ) from None

    def read(self) -> Iterator[Record]:
        """Yield all whole records, oldest first; count damaged lines in `skipped_lines`.

        Raises:
            StorageError: If the file exists and cannot be read.
            RecordError: If a whole line has a format that only a newer kgen reads.
        """
        self.skipped_lines = 0
        for number, line in enumerate(self.read_bytes(0).splitlines(), start=1):
            record = self._record_of(number, line)
            if record is not None:
                yield record

    def follow(self, offset: int = 0) -> tuple[list[Record], int]:
        """Return the whole records after an offset in bytes, and the offset after them.

        Raises:
            StorageError, RecordError: As for `read`.
        """
        raw = self.read_bytes(offset)
        whole = raw[: raw.rfind(b"\n") + 1]  # another process may be writing the rest
        found = (self._record_of(n, line) for n, line in enumerate(whole.splitlines(), start=1))
        return [record for record in found if record is not None], offset + len(whole)

    def read_bytes(self, offset: int) -> bytes:
        """The content of the file from an offset on; empty if there is no file.

        Raises:
            StorageError: If the file exists and cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                return file.read()
        except FileNotFoundError:
            return b""
        except OSError as problem:
            raise StorageError(f"{self.path}: cannot be read: {problem.strerror}") from None

    def _record_of(self, number: int, line: bytes) -> Record | None:
        """The record of a line; None for an empty or damaged one, which counts as skipped."""
        if not line.strip():
            return None
        try:
            return record_from_dict(json.loads(line))
        except (ValueError, RecursionError, RecordError):
            self._refuse_newer(number, line)
            self.skipped_lines += 1
            return None

    def _refuse_newer(self, number: int, line: bytes) -> None:
        """Raise RecordError if an unreadable line is a record of a newer kgen."""
        try:
            found = json.loads(line)["format"]
        except (ValueError, RecursionError, KeyError, TypeError):
            return
        if isinstance(found, int) and found > FORMAT:
            raise RecordError(
                f"{self.path}:{number}: a record of format {found}; this kgen reads up to "
                f"{FORMAT}\n  next: use the kgen that wrote it, or a folder of its own: --out DIR"
            )


def _write_whole(descriptor: int, data: bytes, size_before: int) -> None:
    written = os.write(descriptor, data)
    if written != len(data):  # a full disk accepted a part of the line: remove the part
        os.ftruncate(descriptor, size_before)
        raise OSError(28, "No space left on device")
