"""Adapt the configs of a table's rows to the problem of a call, under the rules of their families.

A config that won a row may break a rule at the call's problem: it splits T although there are
enough heads, or its tile does not fit the dtype. Then parameters are changed one at a time, each
time to the choice that leaves the fewest rules broken, or two at a time if no single change helps.
The result must obey all rules of legality, and the device's limits on a CTA's threads and shared
memory. It obeys all rules of efficiency, too, if such a config is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from math import inf
from typing import Any, NamedTuple

from .families import Instance
from .launches import fits_device
from .rows import Call, ConfigCall, Family, Rule, Value
from .spelling import spell

# Weight of one parameter's step to the next choice, in the unit of `distance`. This weight and
# FIRST have the smallest loss on recorded problems (docs/decisions/0028).
STEP = 0.5
# FIRST is added to the distance of a variant's nearest row for the configs that no row holds but a
# search would try first. UNPROVEN is the distance of a variant without rows. Search spaces list the
# variants that are expected to be fast first, so each further variant without rows is farther by
# `NEXT_UNPROVEN`, which exceeds the changes that usually make a config legal.
FIRST = 1.0
UNPROVEN = 6.0
NEXT_UNPROVEN = 3.0
MOST_CHANGES = 6
ILLEGAL = 1000  # a broken rule of legality counts as many broken rules of efficiency
_CONFIG = re.compile(r"(\w+)\((.*)\)", re.DOTALL)


class Adapted(NamedTuple):
    """A config for a call.

    Attributes:
        instance: The family and its config.
        suits: Whether the config obeys the rules of efficiency.
        steps: Number of steps between neighbouring choices from the config that it was adapted
            from.
    """

    instance: Instance
    suits: bool
    steps: int


def named_values(family: Family, config: str) -> tuple[Value, ...] | None:
    """Read the values of a row's config; None if the family has no such config."""
    found = _CONFIG.fullmatch(config)
    if found is None or found[1] != family.name:
        return None
    said = dict(part.split("=", 1) for part in found[2].split(", ") if part)
    values: list[Value] = []
    for parameter in family.parameters:
        text = said.pop(parameter.name, None)
        if text is None and parameter.default is not None:
            values.append(parameter.default)
            continue
        same = [choice for choice in parameter.choices if spell(choice) == text]
        if not same:
            return None
        values.append(same[0])
    return None if said else tuple(values)


class FamilyRules:
    """The rules of a family at one call. The result for each config is computed once.

    Attributes:
        family: The family.
        admits: Whether any config may serve the call.
    """

    def __init__(self, family: Family, call: Call) -> None:
        """Prepare to judge configs.

        Args:
            family: The family.
            call: The call on which the rules are evaluated, without the parameters' values.
        """
        self.family = family
        known = ConfigCall(call.__dict__, family.named)
        self.admits = all(_holds(rule, known) for rule in family.admits)
        if self.admits:
            _compute(known, family.named)
        self._known = known.__dict__
        self._names = tuple(parameter.name for parameter in family.parameters)
        self._places = tuple({choice: place for place, choice in enumerate(parameter.choices)}
                             for parameter in family.parameters)
        self._rules = [(rule, ILLEGAL) for rule in family.fits]
        self._rules += [(rule, 1) for rule in family.suits]
        self._broken: dict[tuple[Value, ...], int] = {}

    def call_of(self, values: tuple[Value, ...]) -> Call:
        """Return the call with the values of a config."""
        made = ConfigCall(self._known, self.family.named)
        made.__dict__.update(zip(self._names, values, strict=True))
        return made

    def suits(self, values: tuple[Value, ...]) -> bool:
        """Whether a config is worth a trial for the call."""
        if not self.admits:
            return False
        trial = self.call_of(values)
        return all(_holds(rule, trial) for rule in self.family.suits)

    def adapted(
        self, start: tuple[Value, ...], most_changes: int = MOST_CHANGES
    ) -> Adapted | None:
        """Return a config close to `start` that is correct for the call, or None.

        Args:
            start: Values of the family's parameters, in order.
            most_changes: Most changes, one after the other.
        """
        if not self.admits:
            return None
        values, broken = start, self._count_broken(start, inf)
        for _ in range(most_changes):
            if not broken:
                break
            blamed = self._blamed(values)
            for count in (1, 2):
                near = _neighbours(self.family, values, count, blamed)
                found = self._best(start, near, broken - 1)
                if found is not None:
                    values, broken = found
                    break
            else:
                break
        if broken >= ILLEGAL:
            return None
        return Adapted(Instance(self.family, values), not broken, self._steps(start, values))

    def _best(
        self, start: tuple[Value, ...], configs: Iterable[tuple[Value, ...]], most: int
    ) -> tuple[tuple[Value, ...], int] | None:
        """Return the config that breaks the fewest rules, with their number; ties go to the config
        nearest to `start`. None if all configs break more than `most` rules.
        """
        best, best_steps = None, 0
        for values in configs:
            broken = self._count_broken(values, most)
            if broken > most:
                continue
            steps = self._steps(start, values)
            if best is None or broken < most or steps < best_steps:
                best, best_steps, most = (values, broken), steps, broken
        return best

    def _blamed(self, values: tuple[Value, ...]) -> frozenset[int]:
        """Indices of the parameters that a config's broken rules read; changing others is useless.
        """
        read: set[str] = set()
        is_legal = True
        for rule, weight in self._rules:
            trial = _Reader(self._known, self.family.named, self._names, values)
            if not _holds(rule, trial):
                read |= trial.read
                is_legal = is_legal and weight < ILLEGAL
        if is_legal:
            trial = _Reader(self._known, self.family.named, self._names, values)
            if not fits_device(self.family, trial):
                read |= trial.read
        return frozenset(place for place, name in enumerate(self._names) if name in read)

    def _count_broken(self, values: tuple[Value, ...], most: float) -> int:
        """Count the rules that a config breaks; a rule of legality counts as `ILLEGAL`.

        Counting stops above `most`, so a larger result is only a lower limit.
        """
        known = self._broken.get(values)
        if known is not None and (known >= 0 or -known > most):
            return abs(known)
        trial = self.call_of(values)
        broken = 0
        for place, (rule, weight) in enumerate(self._rules):
            if not _holds(rule, trial):
                broken += weight
                if broken > most:
                    # A rule that refuses one config probably refuses its neighbours: test it first.
                    self._rules.insert(0, self._rules.pop(place))
                    self._broken[values] = -broken
                    return broken
        if broken < ILLEGAL and not fits_device(self.family, trial):
            broken += ILLEGAL
        self._broken[values] = broken
        return broken

    def _steps(self, start: tuple[Value, ...], values: tuple[Value, ...]) -> int:
        """Number of steps between neighbouring choices from one config to the other."""
        return sum(abs(places[a] - places[b])
                   for places, a, b in zip(self._places, start, values, strict=True) if a != b)


class _Reader(Call):
    """A call with the values of a config that records which parameters are read.

    Attributes:
        read: Names of the parameters that were read.
    """

    read: set[str]

    def __init__(
        self, known: Mapping[str, object], named: Mapping[str, Callable[[Call], Any]],
        names: tuple[str, ...], values: tuple[Value, ...],
    ) -> None:
        super().__init__()
        self.__dict__.update(known)
        for name in names:
            self.__dict__.pop(name, None)
        self.__dict__["read"] = set()
        self.__dict__["_values"] = dict(zip(names, values, strict=True))
        self.__dict__["_named"] = named

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Value] = self.__dict__["_values"]
        if name in values:
            self.read.add(name)
            return values[name]
        if name not in self.__dict__["_named"]:
            raise AttributeError(name)
        return self.__dict__["_named"][name](self)  # not cached, so that each rule's reads show


def _compute(call: ConfigCall, named: Mapping[str, object]) -> None:
    """Compute the named expressions that depend on no parameter, once for all configs."""
    for name in named:
        with suppress(AttributeError, ArithmeticError):
            getattr(call, name)


def with_values(call: Call, family: Family, values: Sequence[Value]) -> Call:
    """Return a call that also has the values of a config."""
    named = Instance(family, tuple(values)).named
    return ConfigCall({**call.__dict__, **named}, family.named)


def _holds(rule: Rule, call: Call) -> bool:
    """Whether a rule holds; a division by an extent of zero means that it does not."""
    try:
        return bool(rule(call))
    except ArithmeticError:
        return False


def _neighbours(
    family: Family, values: tuple[Value, ...], changes: int, blamed: frozenset[int]
) -> Iterator[tuple[Value, ...]]:
    """Yield the configs that differ in `changes` parameters, of which at least one is blamed."""
    for changed in combinations(range(len(values)), changes):
        if blamed.isdisjoint(changed):
            continue
        others = [[choice for choice in family.parameters[at].choices if choice != values[at]]
                  for at in changed]
        for chosen in product(*others):
            made = list(values)
            for at, choice in zip(changed, chosen, strict=True):
                made[at] = choice
            yield tuple(made)
