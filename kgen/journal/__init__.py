"""The append-only journal of trials."""

from kgen.journal.codec import record_from_dict, record_to_dict
from kgen.journal.journal import Journal

__all__ = ["Journal", "record_from_dict", "record_to_dict"]
