"""Choose configs of families for a call: those of the nearest rows, adapted to the rules.

A config that won a row may break a rule at the call's problem: it splits T where there are heads
enough, or its tile does not fit the dtype. Then parameters are changed one at a time, each time to
the choice that leaves the fewest rules broken, and two at a time where one change does not help.
All rules of legality must hold in the end, and all rules of efficiency if such a config is found.
Legal is only what the device admits: a CTA's threads and shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

from .families import Instance
from .launches import fits_device
from .rows import Call, ConfigCall, Family, Rule, Value
from .spelling import spell

# What a parameter's step to the next choice weighs in the unit of `distance`. This weight and FIRST
# lose least on recorded problems (docs/decisions/0028).
STEP = 0.5
# A config that no row holds, but a search would try first, is farther than the rows of its variant
# by this much; and the distance of a variant without rows. Search spaces list the variants that are
# expected to be fast first: each next variant without rows is farther by `NEXT_UNPROVEN`, more than
# the changes that usually make a config legal.
FIRST = 1.0
UNPROVEN = 6.0
NEXT_UNPROVEN = 3.0
MOST_CHANGES = 6
ILLEGAL = 1000  # rules of efficiency that one rule of legality outweighs
_CONFIG = re.compile(r"(\w+)\((.*)\)", re.DOTALL)


class Adapted(NamedTuple):
    """A config for a call.

    Attributes:
        instance: The family and its config.
        suits: Whether it obeys the rules of efficiency.
        steps: Number of steps from choice to choice away from the config that it began with.
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


def adapted(
    family: Family, start: tuple[Value, ...], call: Call, most_changes: int = MOST_CHANGES
) -> Adapted | None:
    """Return a config near to `start` that is correct for a call, or None.

    Args:
        family: The family.
        start: Values of its parameters, in order.
        call: As the family's rules take it, without the parameters' values.
        most_changes: Number of parameters that may be changed, one after the other.
    """
    if not admitted(family, call):
        return None
    best = _judged(family, start, start, call)
    for _ in range(most_changes):
        if not best.broken:
            break
        for count in (1, 2):
            near = (_judged(family, start, values, call)
                    for values in _neighbours(family, best.values, count))
            found = min(near, key=lambda entry: (entry.broken, entry.steps), default=best)
            if found.broken < best.broken:
                best = found
                break
        else:
            break
    if best.broken >= ILLEGAL:
        return None
    return Adapted(Instance(family, best.values), not best.broken, best.steps)


class _Judged(NamedTuple):
    """A config with the number of rules that it breaks, a rule of legality as `ILLEGAL` ones."""

    values: tuple[Value, ...]
    broken: int
    steps: int


def _judged(
    family: Family, start: tuple[Value, ...], values: tuple[Value, ...], call: Call
) -> _Judged:
    trial = with_values(call, family, values)
    broken = sum(ILLEGAL for rule in family.fits if not _holds(rule, trial))
    if not broken and not fits_device(family, trial):
        broken = ILLEGAL
    broken += sum(not _holds(rule, trial) for rule in family.suits)
    steps = sum(abs(parameter.choices.index(a) - parameter.choices.index(b))
                for parameter, a, b in zip(family.parameters, start, values, strict=True))
    return _Judged(values, broken, steps)


def with_values(call: Call, family: Family, values: Sequence[Value]) -> Call:
    """Return a call that also has the values of a config."""
    named = Instance(family, tuple(values)).named
    return ConfigCall({**call.__dict__, **named}, family.named)


def admitted(family: Family, call: Call) -> bool:
    """Whether some config of a family may serve a call."""
    named = ConfigCall(call.__dict__, family.named)
    return all(_holds(rule, named) for rule in family.admits)


def suits(family: Family, values: tuple[Value, ...], call: Call) -> bool:
    """Whether a config is worth a trial for a call."""
    named = with_values(call, family, values)
    return admitted(family, call) and all(_holds(rule, named) for rule in family.suits)


def _holds(rule: Rule, call: Call) -> bool:
    """Whether a rule holds; a division by an extent of zero means that it does not."""
    try:
        return bool(rule(call))
    except ArithmeticError:
        return False


def _neighbours(
    family: Family, values: tuple[Value, ...], changes: int
) -> Iterator[tuple[Value, ...]]:
    """Yield the configs that differ in so many parameters."""
    for changed in combinations(range(len(values)), changes):
        others = [[choice for choice in family.parameters[at].choices if choice != values[at]]
                  for at in changed]
        for chosen in product(*others):
            made = list(values)
            for at, choice in zip(changed, chosen, strict=True):
                made[at] = choice
            yield tuple(made)
