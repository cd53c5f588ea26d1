"""What earlier tunes already know, from the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kgen.errors import KgenError
from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.record import Fate, Record

QUARANTINED = (Fate.CRASHED, Fate.TIMED_OUT)


def still_valid(
    records: Iterable[Record],
    feasible: set[Config],
    key_of: Callable[[Config], tuple[str, Rendered]],
    retry: bool = False,
) -> dict[Config, Record]:
    """Pick the newest record of each feasible config whose key is what it would be today.

    What crashed or hung is among them, and so is not tried again: it would cost a worker each
    time. `retry` leaves those out, for faults that were the machine's.
    """
    newest: dict[Config, Record] = {}
    for record in records:
        if record.config in feasible:
            newest[record.config] = record
    if retry:
        newest = {c: r for c, r in newest.items() if r.fate not in QUARANTINED}
    valid: dict[Config, Record] = {}
    for config, record in newest.items():
        try:
            key, _ = key_of(config)
        except KgenError:
            continue  # a template that broke since is the search's to report
        if key == record.key:
            valid[config] = record
    return valid
