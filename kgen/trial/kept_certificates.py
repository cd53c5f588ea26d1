"""Find the certificates in journals that are still valid, so that no kernel is certified twice.

A certificate is found by the key of its trial, which holds the digest of the machine code, the
compiler, the problem and the launches. It is valid if the digests of the definition, the guards and
the verifier are the current ones, and no later record of the same key says `wrong`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kgen.journal import Journal
from kgen.model.record import Fate, Record


class KeptCertificates:
    """The certificates of one pass on one GPU, in the tune's own journal and in others."""

    def __init__(self, others: Sequence[Path], is_current: Callable[[Record], bool]) -> None:
        """Prepare; reads nothing yet.

        Args:
            others: Further journals of the operator and GPU, such as the committed library's.
            is_current: Whether a record is of this pass and GPU, with the current definition,
                guards and verifier.
        """
        self._others = tuple(others)
        self._is_current = is_current
        self._by_key: dict[str, Record] = {}
        self._offset = 0
        self._own_ids: set[str] = set()
        self._others_read = False

    def find(self, journal: Journal, keys: Sequence[str]) -> Record | None:
        """Return the newest record of the keys if it is a certificate; None if there is none.

        Args:
            journal: The tune's own journal. Records that were appended since the last call, also by
                other processes, are read first.
            keys: The keys of one kernel, for cold and for warm L2.
        Raises:
            StorageError, RecordError: As in `Journal.read`.
        """
        self._read(journal)
        found = [self._by_key[key] for key in keys if key in self._by_key]
        if any(record.fate is not Fate.VERIFIED for record in found):
            return None
        return max(found, key=lambda record: record.when, default=None)

    def is_own(self, record: Record) -> bool:
        """Whether a record that was found is in the tune's own journal."""
        return record.id in self._own_ids

    def _read(self, journal: Journal) -> None:
        if not self._others_read:  # read first, so that the tune's own records replace them
            self._others_read = True
            for path in self._others:
                if path.resolve() != journal.path.resolve():
                    self._add(list(Journal(path).read()))
        records, self._offset = journal.follow(self._offset)
        self._own_ids.update(record.id for record in records)
        self._add(records)

    def _add(self, records: Sequence[Record]) -> None:
        for record in records:
            # Two kinds of verified records are no certificates and do not revoke one: trials of a
            # search, and predicted rows, which ran only on the CPU.
            is_certificate = record.evidence is not None and record.evidence.launches > 0
            counts = is_certificate or record.fate is not Fate.VERIFIED
            if record.key and counts and self._is_current(record):
                self._by_key[record.key] = record
