"""Rank configs for a call by a model of recorded times.

`kgen emit --learn-rankings` learns a model per pass and GPU from the committed searches and writes
it beside the operator's tables (`ranking_h200.py`). It is a sum of oblivious trees: all nodes of
one depth of such a tree share one comparison. It predicts ln(time of a config / least time of its
problem) from numbers that are known without a compiler. docs/decisions/0045 has the evidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

from .launches import launches_of
from .rows import Call, Family, Value

# Weight of a unit of `distance` in ln(time): if the model predicts little difference, the config of
# a nearer row serves.
DISTANCE_WEIGHT = 0.1
_RESERVED_SMEM = 1024  # bytes per CTA that the driver reserves, from compute capability 8.0 on


class Tree(NamedTuple):
    """An oblivious tree.

    Attributes:
        features: Name of the number that each depth compares.
        thresholds: The threshold of each depth.
        values: The predictions, indexed by the bits of the comparisons: bit d is set if the number
            of depth d is above its threshold.
    """

    features: tuple[str, ...]
    thresholds: tuple[float, ...]
    values: tuple[float, ...]


class Winner(NamedTuple):
    """The fastest config of a recorded search.

    Attributes:
        operator: The operator; those of a family share their models.
        config: The config, as it is written in rows.
        dims: The problem's extents, in the signature's order.
        dtypes: The problem's dtypes and options, in the signature's order.
    """

    operator: str
    config: str
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]

    @property
    def problem(self) -> tuple[str, tuple[int, ...], tuple[str, ...]]:
        """The operator and the problem that was searched."""
        return self.operator, self.dims, self.dtypes


class Ranking(NamedTuple):
    """A model of one pass on one GPU.

    Attributes:
        problems: Number of problems from which it was learnt.
        base: The prediction without any tree.
        trees: The trees, whose predictions are added to `base`.
        winners: Configs that dispatch may adapt to a call, besides those of rows.
    """

    problems: int
    base: float
    trees: tuple[Tree, ...]
    winners: tuple[Winner, ...] = ()

    def predicted(self, configs: Sequence[Mapping[str, float]]) -> list[float]:
        """Predict ln(time / least time) of configs; a number that a config lacks counts as 0.

        Args:
            configs: The numbers of each config (`features_of`).
        """
        if not configs:
            return []
        totals = [self.base] * len(configs)
        numbers: dict[str, list[float] | float] = {}
        outcomes: dict[tuple[str, float], list[bool] | bool] = {}
        for names, thresholds, values in self.trees:
            shared = 0  # bits of the comparisons with the same outcome for all configs
            others: list[tuple[int, list[bool]]] = []
            for depth, compared in enumerate(zip(names, thresholds, strict=True)):
                above = outcomes.get(compared)
                if above is None:
                    name, threshold = compared
                    if name not in numbers:
                        numbers[name] = _numbers(name, configs)
                    above = outcomes[compared] = _above(numbers[name], threshold)
                if isinstance(above, list):
                    others.append((1 << depth, above))
                elif above:
                    shared |= 1 << depth
            for place in range(len(configs)):
                leaf = shared
                for bit, is_above in others:
                    if is_above[place]:
                        leaf |= bit
                totals[place] += values[leaf]
        return totals


def _numbers(name: str, configs: Sequence[Mapping[str, float]]) -> list[float] | float:
    """One number of all configs: a list, or a single value if all are equal.

    Most numbers that depend only on the problem are equal.
    """
    found = [config.get(name, 0.0) for config in configs]
    return found if len(set(found)) > 1 else found[0]


def _above(numbers: list[float] | float, threshold: float) -> list[bool] | bool:
    if isinstance(numbers, list):
        return [number > threshold for number in numbers]
    return numbers > threshold


def features_of(family: Family, values: tuple[Value, ...], call: Call,
                dims: Mapping[str, int], choices: Mapping[str, str]) -> dict[str, float]:
    """Return the numbers by which a config is ranked.

    Args:
        family: The variant.
        values: The values of its parameters; the config is correct for the call.
        call: The call on which the family's rules are evaluated, with the parameters' values.
        dims: Every dim of the problem.
        choices: Every dtype field and option of the problem.
    """
    found = {f"variant={family.name}": 1.0, "dims": float(prod(max(e, 1) for e in dims.values()))}
    found |= {name: float(extent) for name, extent in dims.items()}
    found |= {f"{name}={choice}": 1.0 for name, choice in choices.items()}
    for parameter, value in zip(family.parameters, values, strict=True):
        found |= _number(parameter.name, value)
    for name in family.named:
        try:
            found |= _number(name, getattr(call, name))
        except ArithmeticError:
            continue  # no value for this config, for example because of a division by 0
    return found | _launched(family, call)


def _number(name: str, value: Any) -> dict[str, float]:
    return {f"{name}={value}": 1.0} if isinstance(value, str) else {name: float(value)}


def _launched(family: Family, call: Call) -> dict[str, float]:
    """Numbers about the launch that does most of the work, and about how it fills the device."""
    seen = launches_of(family, call)
    found = {"launches": float(len(seen.made)), "workspace": float(seen.elements)}
    if not seen.made:
        return found
    ctas, threads, smem = max(seen.made, key=lambda made: made[0] * made[1])
    warps = ceil(threads / call.warp_size)
    resident = max(1, min(
        call.max_blocks_per_sm, call.max_threads_per_sm // (warps * call.warp_size),
        call.smem_per_sm // (smem + _RESERVED_SMEM)))
    waves = ctas / (resident * call.sm_count)
    return found | {
        "launch.ctas": float(ctas),
        "launch.threads": float(threads),
        "launch.smem": float(smem),
        "launch.all_threads": float(ctas * threads),
        "launch.resident_ctas": float(resident),
        "launch.waves": waves,
        "launch.tail": waves / ceil(waves),
        "launch.resident_threads": min(1.0, waves) * resident * threads,
    }
