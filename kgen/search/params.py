"""Configs as Optuna parameters: `variant`, and `<variant>.<parameter>` for what it declares.

The variant's name is part of the parameter's name because Optuna forbids one name to have two
lists of choices within a study, and two variants may well offer different `vec`s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.model.config import Config, Value

VARIANT = "variant"


def param_name(variant: str, name: str) -> str:
    """Return the Optuna name of a variant's parameter."""
    return f"{variant}.{name}"


def to_params(config: Config) -> dict[str, Value]:
    """Return a config as Optuna parameters."""
    params: dict[str, Value] = {VARIANT: config.variant}
    for name, value in config.values:
        params[param_name(config.variant, name)] = value
    return params


@dataclass(frozen=True)
class ParamSpace:
    """The Optuna side of a feasible set.

    Attributes:
        choices: For each Optuna parameter the values that occur in the feasible set, sorted.
        order: For each variant its parameter names, as declared.
    """

    choices: Mapping[str, tuple[Value, ...]]
    order: Mapping[str, tuple[str, ...]] = field(repr=False)

    @classmethod
    def of(cls, configs: Iterable[Config]) -> ParamSpace:
        """Collect the parameters and values of a feasible set."""
        seen: dict[str, set[Value]] = {VARIANT: set()}
        order: dict[str, tuple[str, ...]] = {}
        for config in configs:
            seen[VARIANT].add(config.variant)
            if config.variant not in order:
                order[config.variant] = tuple(name for name, _ in config.values)
            for name, value in config.values:
                seen.setdefault(param_name(config.variant, name), set()).add(value)
        return cls({name: _sorted(values) for name, values in seen.items()}, order)

    @property
    def digest(self) -> str:
        """Identity of the choices; a study can be continued only while it stays the same."""
        text = json.dumps(
            {name: list(values) for name, values in self.choices.items()}, sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def config_of(self, params: Mapping[str, object]) -> Config | None:
        """Return the config that a trial's parameters spell, or None if they are not of this space.

        A trial whose process died between two suggestions has only a part of its parameters.
        """
        variant = params.get(VARIANT)
        if not isinstance(variant, str) or variant not in self.order:
            return None
        values: list[tuple[str, Value]] = []
        for name in self.order[variant]:
            value = params.get(param_name(variant, name))
            if not isinstance(value, (bool, int, float, str)):
                return None
            values.append((name, value))
        return Config(variant, tuple(values))

    def normal(self, config: Config) -> Config:
        """Return a config with its values in the declared order, which equality asks for."""
        order = self.order.get(config.variant)
        values = config.as_dict()
        if order is None or set(order) != set(values):
            return config
        return Config(config.variant, tuple((name, values[name]) for name in order))


def _sorted(values: set[Value]) -> tuple[Value, ...]:
    numbers = [value for value in values if not isinstance(value, str)]
    texts = [value for value in values if isinstance(value, str)]
    ordered: Sequence[Value] = [*sorted(numbers), *sorted(texts)]
    return tuple(ordered)
