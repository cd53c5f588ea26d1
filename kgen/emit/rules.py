"""The functions of learnt rules in a generated table: nested ifs over the dims of a call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kgen.emit.layout import docstring, quoted
from kgen.model.rule_tree import Leaf, LearntRule, RuleTree

INDENT = 4


@dataclass(frozen=True, slots=True)
class RuleFunction:
    """The values of a rule for its template."""

    name: str
    doc: str
    lines: tuple[str, ...]
    pass_name: str
    dtypes: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    problems: int
    mean_loss: float
    worst_loss: float
    extents: tuple[tuple[str, int, int], ...]


def rule_functions(rules: Iterable[LearntRule]) -> list[RuleFunction]:
    """Return the functions of a table's rules, in order."""
    counts: dict[str, int] = {}
    functions = []
    for rule in rules:
        count = counts[rule.pass_name] = counts.get(rule.pass_name, 0) + 1
        covered = ", ".join(f"{n}={v}" for n, v in (*rule.constants, *rule.dtypes))
        functions.append(RuleFunction(
            name=f"{rule.pass_name}_rule_{count}",
            doc=docstring(f"Rows for {covered}, the preferred first", INDENT),
            lines=tuple(_lines(rule.tree, "")),
            pass_name=rule.pass_name,
            dtypes=tuple(name for _, name in rule.dtypes),
            constants=rule.constants,
            problems=rule.problems,
            mean_loss=rule.mean_loss,
            worst_loss=rule.worst_loss,
            extents=rule.extents,
        ))
    return functions


def _lines(tree: RuleTree, margin: str) -> list[str]:
    if isinstance(tree, Leaf):
        return [f"{margin}return {quoted(tree.rows)}"]
    product = " * ".join(f"call.{name}" for name in tree.dims)
    return [
        f"{margin}if {product} <= {tree.at_most}:",
        *_lines(tree.below, margin + " " * INDENT),
        *_lines(tree.above, margin),
    ]
