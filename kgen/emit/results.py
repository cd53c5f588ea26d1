"""Named tuples, which a generated function with several outputs returns.

Which outputs a call has depends on its arguments, so a function has a class for each combination
of several outputs. If there is only one such combination, the class is `<Function>Result`.
Otherwise the name also lists the optional outputs that are present: `RmsnormResultWithHAndRstd`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from kgen.emit.optional_tensors import OptionalTensors
from kgen.model.signature import Pass


@dataclass(frozen=True, slots=True)
class Result:
    """One combination of outputs of a pass.

    Attributes:
        absent: Whether each optional output is absent, in declared order.
        fields: The outputs that are present, in declared order.
        name: The name of their named tuple; empty for a single output, returned as a tensor.
    """

    absent: tuple[bool, ...]
    fields: tuple[str, ...]
    name: str


def decider(condition: str) -> str:
    """The parameter of a condition such as `residual is not None` or `return_norm`."""
    return condition.removesuffix(" is not None")


def results(function: str, passed: Pass, optional: OptionalTensors) -> tuple[Result, ...]:
    """All combinations of outputs that a function may return, the fewest outputs first."""
    conditions = {output: decider(condition) for output, condition in optional.outputs.items()}
    deciders = list(dict.fromkeys(conditions.values()))
    found: list[Result] = []
    for choice in product((False, True), repeat=len(deciders)):
        chosen = dict(zip(deciders, choice, strict=True))
        fields = tuple(o.name for o in passed.outputs
                       if o.name not in conditions or chosen[conditions[o.name]])
        absent = tuple(not chosen[parameter] for parameter in conditions.values())
        found.append(Result(absent, fields, ""))
    found.sort(key=lambda result: len(result.fields))
    several = [result for result in found if len(result.fields) > 1]
    return tuple(
        Result(r.absent, r.fields, _name(function, r, conditions, len(several)))
        if r in several else r for r in found
    )


def absent_arguments(optional: OptionalTensors) -> list[str]:
    """Whether each optional output is absent, from the arguments of a call: `residual is None`."""
    return [c.replace("is not None", "is None") if c.endswith("is not None") else f"not {c}"
            for c in optional.outputs.values()]


def absent_outputs(optional: OptionalTensors) -> list[str]:
    """Whether each optional output is absent, from the outputs of a call: `h is None`."""
    return [f"{name} is None" for name in optional.outputs]


def chosen(made: Sequence[Result], table: str, absent: Sequence[str]) -> tuple[str, list[str], str]:
    """The expression that builds the result of a call: its head, items and tail.

    Args:
        made: All combinations.
        table: The variable that maps which outputs are absent to a combination.
        absent: The key of `table`, from `absent_arguments` or `absent_outputs`.
    """
    if len(made) == 1:
        return made[0].name or "only", [], ""
    return f"{table}[", [f"({absent[0]},)"] if len(absent) == 1 else list(absent), "]"


def _name(function: str, result: Result, conditions: dict[str, str], count: int) -> str:
    name = f"{_camel(function)}Result"
    there = [_camel(field) for field in result.fields if field in conditions]
    return f"{name}With{'And'.join(there)}" if there and count > 1 else name


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
