"""Compare two bound plans by their numbers, independent of names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kgen.emit.binding import BoundPlan
from kgen.model.expr import parse_expr

PlanValues = tuple[list[tuple[str, list[object]]], list[tuple[str, object]]]


def plan_values(
    plan: BoundPlan, names: Mapping[str, int], functions: Mapping[str, str]
) -> PlanValues:
    """A plan's numbers for a problem, independent of names.

    A kernel is identified by its code if that is known, a workspace by the order in which the
    launches first use it.
    """
    args = [argument for launch in plan.launches for argument in launch.args]
    workspaces = sorted(plan.workspaces, key=lambda w: args.index(w.name))
    places = {w.name: f"workspace {place}" for place, w in enumerate(workspaces)}

    def value(text: str) -> object:
        if text in places:
            return places[text]
        expression = parse_expr(text)
        return expression(names) if expression.names <= names.keys() else text

    launches = [
        (functions.get(x.kernel, ""),
         [*map(value, (*x.grid, *x.block, x.smem, *x.args)), x.kinds, x.pdl])
        for x in plan.launches
    ]
    return launches, [(w.dtype, value(w.elements)) for w in workspaces]


def first_difference(before: Sequence[PlanValues], after: Sequence[PlanValues]) -> str:
    """Describe the first sample that differs."""
    was, now = next((b, a) for b, a in zip(before, after, strict=True) if b != a)
    return f"{was} became {now}"
