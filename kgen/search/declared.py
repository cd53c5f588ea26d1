"""Convert stored configs to points of the current search space."""

from __future__ import annotations

from kgen.catalogue import Entry
from kgen.model.config import Config
from kgen.runtime.spelling import spell


def as_declared(entry: Entry, pass_name: str, config: Config) -> Config | None:
    """The config with its values in declared order; None if the space has no such point."""
    found = [v for v in entry.space.of_pass(pass_name) if v.name == config.variant]
    if not found:
        return None
    variant = found[0]
    said = variant.values(config)
    if {p.name for p in variant.params} != set(said):
        return None
    values = {}
    for param in variant.params:
        same = [c for c in param.choices if spell(c) == spell(said[param.name])]
        if not same:
            return None
        values[param.name] = same[0]
    return variant.config(values)
