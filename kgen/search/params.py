"""Configs as Optuna parameters: `variant`, and `<variant>.<parameter>` for what it declares.

The variant's name is part of the parameter's name because Optuna forbids one name to have two
lists of choices within a study, and two variants may well offer different `vec`s.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

from kgen.model.config import Config, Value

VARIANT = "variant"
DEFAULT = "default"  # value of a parameter that a config omits


def param_name(variant: str, name: str) -> str:
    """Return the Optuna name of a variant's parameter."""
    return f"{variant}.{name}"


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
        named: dict[str, set[tuple[str, ...]]] = {}
        for config in configs:
            seen[VARIANT].add(config.variant)
            named.setdefault(config.variant, set()).add(tuple(name for name, _ in config.values))
            for name, value in config.values:
                seen.setdefault(param_name(config.variant, name), set()).add(value)
        order = {variant: _merged(names) for variant, names in named.items()}
        for variant, every in order.items():
            for name in every:
                if any(name not in names for names in named[variant]):
                    seen[param_name(variant, name)].add(DEFAULT)
        return cls({name: _sorted(values) for name, values in seen.items()}, order)

    @property
    def digest(self) -> str:
        """Identity of the choices; a study can be continued only while it stays the same."""
        text = json.dumps(
            {name: list(values) for name, values in self.choices.items()}, sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_params(self, config: Config) -> dict[str, Value]:
        """Return a config as Optuna parameters, with all parameters of its variant."""
        values = config.as_dict()
        order = self.order.get(config.variant, tuple(values))
        return {VARIANT: config.variant} | {
            param_name(config.variant, name): values.get(name, DEFAULT) for name in order
        }

    def config_of(self, params: Mapping[str, object]) -> Config | None:
        """Return the config of a trial's parameters, or None if they are not of this space.

        If the process died between two suggestions, the trial has only a part of its parameters.
        """
        variant = params.get(VARIANT)
        if not isinstance(variant, str) or variant not in self.order:
            return None
        values: list[tuple[str, Value]] = []
        for name in self.order[variant]:
            value = params.get(param_name(variant, name))
            if not isinstance(value, (bool, int, float, str)):
                return None
            if value != DEFAULT or DEFAULT not in self.choices[param_name(variant, name)]:
                values.append((name, value))
        return Config(variant, tuple(values))

    def normal(self, config: Config) -> Config:
        """Return a config with its values in declared order, as comparison requires."""
        order = self.order.get(config.variant)
        values = config.as_dict()
        if order is None or not set(values) <= set(order):
            return config
        return Config(
            config.variant, tuple((name, values[name]) for name in order if name in values)
        )


def _merged(orders: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Merge sequences of names, each of which may omit some, into one consistent order."""
    before: dict[str, dict[str, None]] = {}
    for names in sorted(orders):
        for i, name in enumerate(names):
            before.setdefault(name, {}).update(dict.fromkeys(names[:i]))
    return tuple(TopologicalSorter(before).static_order())


def _sorted(values: set[Value]) -> tuple[Value, ...]:
    numbers = [value for value in values if not isinstance(value, str)]
    texts = [value for value in values if isinstance(value, str)]
    ordered: Sequence[Value] = [*sorted(numbers), *sorted(texts)]
    return tuple(ordered)
