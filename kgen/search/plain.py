"""Configs as plain mappings, for Optuna programs without kgen's variants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kgen.model.config import Config, Value
from kgen.search.params import ParamSpace

PLAIN = ""  # variant of a config that was given as a mapping


def as_config(config: Config | Mapping[str, Value]) -> Config:
    """Return a config as it is, and a mapping as a config without a variant."""
    return config if isinstance(config, Config) else Config(PLAIN, tuple(config.items()))


@dataclass(frozen=True)
class PlainSpace(ParamSpace):
    """The Optuna side of a feasible set of mappings: its parameters have the mappings' keys.

    Mappings may have different keys: a parameter that a method does not have is left out.

    Attributes:
        by_values: The configs by their values, in whatever order.
    """

    by_values: Mapping[frozenset[tuple[str, object]], Config] = field(repr=False)

    @classmethod
    def of(cls, configs: Iterable[Config]) -> PlainSpace:
        """Collect the parameters and values of configs of the variant `PLAIN`."""
        by_values = {frozenset[tuple[str, object]](config.values): config for config in configs}
        seen: dict[str, dict[Value, None]] = {}
        for config in by_values.values():
            for name, value in config.values:
                seen.setdefault(name, {})[value] = None
        return cls({name: tuple(values) for name, values in seen.items()}, {}, by_values)

    def to_params(self, config: Config) -> dict[str, Value]:
        """Return a config as Optuna parameters."""
        return config.as_dict()

    def config_of(self, params: Mapping[str, object]) -> Config | None:
        """Return the config of a trial's parameters; None if they are none of the feasible set.

        A trial that has suggested only a part has no config yet, unless the part is a config too.
        """
        return self.by_values.get(frozenset(params.items()))

    def normal(self, config: Config) -> Config:
        """Return a config with its values in the order of the feasible set."""
        return self.by_values.get(frozenset(config.values), config)
