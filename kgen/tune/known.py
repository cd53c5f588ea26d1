"""What earlier tunes already know, from the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kgen.errors import KgenError
from kgen.model.artifact import Rendered
from kgen.model.config import Config
from kgen.model.record import Record


def still_valid(
    records: Iterable[Record],
    feasible: set[Config],
    key_of: Callable[[Config], tuple[str, Rendered]],
) -> dict[Config, Record]:
    """Pick, of each feasible config, the newest record whose key is what it would be today.

    A journal may hold a config under several keys: timed with cold and with warm L2, say.
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
        if key in by_key:
            valid[config] = by_key[key]
    return valid
