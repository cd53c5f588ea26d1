"""The append-only journal of trials."""

from kgen.journal.codec import record_from_dict, record_to_dict
from kgen.journal.journal import Journal
from kgen.journal.shared import RecordLog, SharedJournal

__all__ = ["Journal", "RecordLog", "SharedJournal", "record_from_dict", "record_to_dict"]
