"""What earlier tunes already know, from the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kgen.errors import KgenError
from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.record import Fate, Record


def still_valid(
    records: Iterable[Record],
    feasible: set[Config],
    key_of: Callable[[Config], tuple[str, Rendered]],
    retry: bool = False,
) -> dict[Config, Record]:
    """Pick, of each feasible config, the newest record whose key is what it would be today.

    A journal may hold a config under several keys: timed with cold and with warm L2, say. What
    crashed or hung is among the records, and so is not tried again: it would cost a worker each
    time. `retry` leaves those out, for faults that were the machine's or a limit's.
    """
    newest: dict[Config, dict[str, Record]] = {}
    for record in records:
        if record.config in feasible:
            newest.setdefault(record.config, {})[record.key] = record
    valid: dict[Config, Record] = {}
    for config, by_key in newest.items():
        try:
            key, _ = key_of(config)
        except KgenError:
            continue  # a template that broke since is the search's to report
        found = by_key.get(key)
        if found is not None and not (retry and _is_quarantined(found)):
            valid[config] = found
    return valid


def _is_quarantined(record: Record) -> bool:
    """Whether its fate may have been the machine's, or a limit's that is wider now."""
    if record.fate is Fate.BUILD_FAILED:
        return "(limit on compile" in record.reason
    return record.fate in (Fate.CRASHED, Fate.TIMED_OUT)
