"""The families of a library: the variants that can be rendered for a call, with their rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kgen.catalogue import Entry
from kgen.emit.binding import BoundPlan, bound_plan, bound_preferences
from kgen.emit.state import TableState
from kgen.model.config import Value
from kgen.model.expr import base_names, parse_expr
from kgen.model.signature import Pass
from kgen.model.space import Param, Variant
from kgen.runtime.spelling import spell


@dataclass(frozen=True, slots=True)
class FamilyState:
    """The fields of a generated `Family`.

    `plan`, the rules and `lets` (name, expression) are printed over dims, dtypes, itemsizes, GPU
    facts, parameters and lets. `admissions` are the rules of legality that depend on no parameter,
    `conditions` the others. `config` is empty; only the plan functions of rows have a config.
    """

    pass_name: str
    variant: str
    template: str
    constants: tuple[str, ...]
    settings: Mapping[str, str]
    params: tuple[Param, ...]
    first: tuple[tuple[Value, ...], ...]
    is_safe: bool
    plan: BoundPlan
    admissions: tuple[str, ...]
    conditions: tuple[str, ...]
    preferences: tuple[str, ...]
    lets: tuple[tuple[str, str], ...]
    config: tuple[tuple[str, Value], ...] = ()


def family_states(entry: Entry, tables: Iterable[TableState]) -> tuple[FamilyState, ...]:
    """Return the families of an operator.

    These are all variants with a row, and variants without a row except two kinds: the safe
    variant, and variants that only reproduce a published kernel. A variant with a step of the
    ladder beyond the published ones stays, because it may serve options without a row, states or
    packed sequences. In a pass without any row, all variants except the safe one are families.

    Args:
        entry: The operator.
        tables: Its tables.
    """
    winners = {(row.pass_name, row.variant) for table in tables for row in table.rows}
    steps = [((step.pass_name, step.config.variant), step.is_published)
             for step in entry.space.ladder]
    published = {key for key, _ in steps} - {key for key, is_published in steps if not is_published}
    families: list[FamilyState] = []
    for passed in entry.operator.signature.passes:
        if not any(pass_name == passed.name for pass_name, _ in winners):
            published -= {key for key in published if key[0] == passed.name}
        for variant in entry.space.of_pass(passed.name):
            key = (passed.name, variant.name)
            if key in winners or (key not in published and variant.safe is None):
                families.append(_family(entry, variant, passed))
    return tuple(families)


def _family(entry: Entry, variant: Variant, passed: Pass) -> FamilyState:
    names = [p.name for p in variant.params]
    # Named expressions are not expanded, because the library computes them by name.
    named = replace(variant, lets=())
    plan = bound_plan(named, passed, {})
    admissions = tuple(text for text in plan.conditions
                       if not base_names(parse_expr(text), dict(variant.lets)) & set(names))
    return FamilyState(
        pass_name=passed.name,
        variant=variant.name,
        template=f"{entry.space.template_folder}/{variant.template}",
        constants=variant.constants,
        settings={name: spell(value) for name, value in variant.settings},
        params=variant.params,
        first=tuple(tuple(variant.values(config)[name] for name in names)
                    for config in variant.first),
        is_safe=variant.safe is not None,
        plan=replace(plan, conditions=()),
        admissions=admissions,
        conditions=tuple(text for text in plan.conditions if text not in admissions),
        preferences=bound_preferences(named, {}),
        lets=tuple((name, expr.text) for name, expr in variant.lets),
    )


def template_files(entry: Entry, families: Iterable[FamilyState]) -> dict[str, bytes]:
    """The templates that families use, by their path below `_templates/`."""
    return {
        name: (entry.templates / name.rpartition("/")[2]).read_bytes()
        for name in sorted({family.template for family in families})
    }
