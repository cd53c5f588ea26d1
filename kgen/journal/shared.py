"""A journal that several machines share: each keeps a file, and a storage exchanges the lines.

The log in the storage is an Optuna study, so that it works with a database as well as with Optuna's
gRPC proxy. One finished trial of the study holds one or more lines of the journal, written in one
transaction. Lines are only ever added, to the files and to the log, so all of them end up with the
union of the lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kgen.journal.journal import Journal
from kgen.model.record import Record

if TYPE_CHECKING:
    import optuna

LOG_PREFIX = "kgen/records"
_LINES = "lines"
_MOST_BYTES = 48_000  # bytes of lines in one trial: MySQL's TEXT holds 64 KB


class RecordLog:
    """The lines of one operator, GPU model and device in a storage."""

    def __init__(self, storage: optuna.storages.BaseStorage, name: str) -> None:
        """Open the log; create it if it is missing."""
        import optuna

        study = optuna.create_study(
            storage=storage, study_name=f"{LOG_PREFIX}/{name}", load_if_exists=True
        )
        self._storage = storage
        self._study_id = storage.get_study_id_from_name(study.study_name)
        self._pulled: set[int] = set()  # numbers of trials

    def push(self, lines: Iterable[str]) -> None:
        """Append lines; the storage holds them when this method returns.

        Raises:
            StorageError: If the storage does not answer.
        """
        from optuna.trial import TrialState, create_trial

        for chunk in _chunks(lines):
            self._storage.create_new_trial(
                self._study_id,
                create_trial(state=TrialState.COMPLETE, value=0.0, user_attrs={_LINES: chunk}),
            )

    def pull(self) -> list[str]:
        """Return the lines that were added since the last call, including those of this process."""
        lines: list[str] = []
        for trial in self._storage.get_all_trials(self._study_id, deepcopy=False):
            if trial.number not in self._pulled and trial.state.is_finished():
                self._pulled.add(trial.number)
                lines += trial.user_attrs[_LINES]
        return lines


class SharedJournal(Journal):
    """A journal file whose lines also go to a log, and to which the log's lines are added.

    A record is written to the file before it is sent. If the storage is lost, the file keeps the
    record, and the next `SharedJournal` on the file sends it.
    """

    def __init__(self, path: Path, log: RecordLog, wanted: Callable[[Record], bool]) -> None:
        """Open the file and the log; `read` or `append` exchanges the lines.

        Args:
            path: The file.
            log: The log.
            wanted: Whether to send a record that the file has and the log lacks: a committed
                journal has thousands of records, of which a tune needs a few.
        """
        super().__init__(path)
        self._log, self._wanted = log, wanted
        self._in_log: set[str] = set()
        self._in_file: dict[str, None] = {}  # in the order of the file
        self._offset = 0  # up to which the file's lines are in `_in_file`
        self._is_first = True

    def append(self, record: Record) -> str:
        """Append a record to the file, then to the log.

        Raises:
            StorageError: If the file or the log cannot be written.
        """
        line = super().append(record)
        self._exchange()
        self._push([line])
        return line

    def read(self) -> Iterator[Record]:
        """Add the lines of other machines to the file, and read it; see `Journal.read`."""
        self._exchange()
        return super().read()

    def follow(self, offset: int = 0) -> tuple[list[Record], int]:
        """Add the lines of other machines to the file, and read it; see `Journal.follow`."""
        self._exchange()
        return super().follow(offset)

    def _exchange(self) -> None:
        """Add the log's new lines to the file; at the first call, also send the file's lines."""
        pulled = self._log.pull()
        self._in_log.update(pulled)
        if pulled:
            self.append_lines(lambda descriptor: self._missing(pulled))
        if self._is_first:
            self._is_first = False  # if sending fails, the next journal on this file sends
            self._read_tail()
            self._push([line for line in self._in_file if self._is_wanted(line)])

    def _push(self, lines: Sequence[str]) -> None:
        new = [line for line in lines if line not in self._in_log]
        self._log.push(new)
        self._in_log.update(new)

    def _missing(self, lines: Sequence[str]) -> list[str]:
        """The lines that the file lacks.

        It is called under the lock of the file, because another process may have added the lines.
        """
        self._read_tail()
        return [line for line in dict.fromkeys(lines) if line not in self._in_file]

    def _read_tail(self) -> None:
        raw = self.read_bytes(self._offset)
        whole = raw[: raw.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._in_file.update(dict.fromkeys(whole.decode(errors="replace").splitlines()))

    def _is_wanted(self, line: str) -> bool:
        record = self._record_of(0, line.encode())
        return record is not None and self._wanted(record)


def _chunks(lines: Iterable[str]) -> Iterable[Sequence[str]]:
    """Divide lines among trials; a line that exceeds the limit of a trial gets its own trial."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        length = len(json.dumps(line)) + 2
        if chunk and size + length > _MOST_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(line)
        size += length
    if chunk:
        yield chunk
