"""The plan functions of a generated table: one per distinct variant, config and bound plan."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kgen.emit.binding import BoundLaunch, BoundPlan, functions_in, names_in
from kgen.emit.families import FamilyState
from kgen.emit.layout import docstring, fold, quoted, wrapped
from kgen.emit.state import RowState, SafeState
from kgen.model.config import Value
from kgen.model.signature import Pass
from kgen.runtime.spelling import spell

INDENT = 4
PlannedRow = RowState | SafeState | FamilyState


@dataclass(frozen=True, slots=True)
class PlanFunction:
    """One `bind` function of a table, and its `fits` function where it has conditions."""

    name: str
    doc: str
    lines: tuple[str, ...]
    scratch: tuple[str, ...]
    run_head: str
    launches: tuple[str, ...]
    condition: str
    fits: str
    helpers: frozenset[str]


def let_lines(lets: Iterable[tuple[str, str]]) -> list[str]:
    """Return `"name": lambda call: ...,` for each named expression, at an indent of four."""
    return [_lambda(f"{quoted(name)}: ", text, INDENT) for name, text in lets]


def rule_lines(rules: Iterable[str], indent: int) -> list[str]:
    """Return `lambda call: ...,` for each rule."""
    return [_lambda("", text, indent) for text in rules]


def _lambda(head: str, text: str, indent: int) -> str:
    head += "lambda call: "
    return head + wrapped(renamed(text, lambda name: f"call.{name}"), indent, len(head) + 1) + ","


def config_label(variant: str, config: Iterable[tuple[str, Value]]) -> str:
    """`variant(a=1, b=2)`."""
    return f"{variant}({', '.join(f'{name}={spell(value)}' for name, value in config)})"


def plan_functions(
    rows: Iterable[PlannedRow], passes: Mapping[str, Pass], facts: frozenset[str]
) -> tuple[dict[tuple[object, ...], PlanFunction], frozenset[str]]:
    """Return the plan functions of rows by `plan_key`, and the helpers that they call.

    Args:
        rows: The rows of one generated module, in order.
        passes: The operator's passes by name.
        facts: Names of GPU facts that are not bound (in safe plans).
    """
    functions: dict[tuple[object, ...], PlanFunction] = {}
    counts: dict[str, int] = {}
    helpers: set[str] = set()
    for row in rows:
        key = plan_key(row)
        if key in functions:
            continue
        counts[row.variant] = counts.get(row.variant, 0) + 1
        name = f"{row.variant}_{counts[row.variant]}"
        label = config_label(row.variant, row.config)
        if isinstance(row, FamilyState):
            name = f"{row.pass_name}_{row.variant}"
            label = f"Launch the {row.pass_name} {row.variant}"
        functions[key] = _plan_function(name, label, row.plan, passes[row.pass_name], facts)
        helpers |= functions[key].helpers
    return functions, frozenset(helpers)


def plan_key(row: PlannedRow) -> tuple[object, ...]:
    """Rows of equal keys share a plan function."""
    return (row.pass_name, row.variant, row.config, row.plan)


def _plan_function(
    name: str, label: str, plan: BoundPlan, passed: Pass, facts: frozenset[str]
) -> PlanFunction:
    used: dict[str, None] = {}
    helpers: set[str] = set()

    def local(text: str) -> str:
        for free in sorted(names_in(text)):
            used[free] = None
        helpers.update(functions_in(text))
        return renamed(text, _local)

    prepared: list[str] = []
    launches: list[str] = []
    grids: list[list[str]] = []
    for index, launch in enumerate(plan.launches):
        suffix = "" if len(plan.launches) == 1 else f"_{index + 1}"
        launcher = f"launch{suffix}"
        block = f"block=({', '.join(map(local, launch.block))})"
        options = [block, f"smem={local(launch.smem)}"]
        if launch.pdl:
            options.append(f"pdl={_pdl(launch.pdl, local, index, grids)}")
        if launch.coresident:
            blocks = " * ".join(f"({local(extent)})" for extent in launch.grid if extent != "1")
            options.append(f"coresident={blocks or 1}")
        prepared.append(fold(
            f"{launcher} = file.launcher(", [quoted(launch.kernel), quoted(launch.kinds), *options],
            ")", INDENT,
        ))
        grid = []
        for axis, extent in zip("xyz", launch.grid, strict=True):
            if extent.isdecimal() or extent.isidentifier():
                grid.append(local(extent))
            else:
                grid.append(f"grid{suffix}_{axis}")
                head = f"{grid[-1]} = "
                prepared.append(head + wrapped(local(extent), INDENT, len(head)))
        grids.append(grid)
        arguments = []
        for position, text in enumerate(_arguments(launch, plan, used)):
            if launch.kinds[position] == "q" and not (text.isdecimal() or text.isidentifier()):
                head = f"number{suffix}_{position} = "
                prepared.append(head + wrapped(local(text), INDENT, len(head)))
                text = head.partition(" ")[0]
            arguments.append(text)
        launches.append(fold(f"{launcher}(", ["stream", *grid, *arguments], ")", 2 * INDENT))
    prepared += [
        fold(f"new_{w.name} = file.scratch(", [local(w.elements), f"torch.{w.dtype}"], ")", INDENT)
        for w in plan.workspaces
    ]
    scratch = [f"{w.name} = new_{w.name}()" for w in plan.workspaces]
    names = [f'{_local(n)} = facts["{n}"]' if n in facts else f"{_local(n)} = call.{n}"
             for n in used]
    parameters = [f"{t.name}: int" for t in passed.tensors]
    parameters += [f"{s.name}: float" for s in passed.scalars]
    for text in plan.conditions:
        helpers |= functions_in(text)
    return PlanFunction(
        name=name,
        doc=docstring(label, INDENT),
        lines=(*names, *prepared),
        scratch=tuple(scratch),
        run_head=fold("def run(", ["stream: int", *parameters], ") -> None:", INDENT),
        launches=tuple(launches),
        condition=_joined(plan.conditions),
        fits=f"{name}_fits" if plan.conditions else "always",
        helpers=frozenset(helpers),
    )


def _pdl(
    pdl: bool | str, local: Callable[[str], str], index: int, grids: list[list[str]]
) -> str:
    earlier = "True" if index == 0 else _any_launched(grids)
    if not isinstance(pdl, str):
        return earlier
    wanted = local(pdl)
    return wanted if earlier == "True" else f"({wanted}) and ({earlier})"


def _any_launched(grids: list[list[str]]) -> str:
    """An expression for whether an earlier launch of the plan has at least one CTA.

    Only then may a later launch use programmatic dependent launch. Otherwise it would overlap the
    kernel before the plan, for whose results its kernel does not wait.
    """
    extents = [[extent for extent in grid if not extent.isdecimal()] for grid in grids
               if "0" not in grid]
    if not extents:
        return "False"
    if not all(extents):
        return "True"
    return " or ".join(" and ".join(f"{extent} > 0" for extent in grid) for grid in extents)


def _arguments(launch: BoundLaunch, plan: BoundPlan, used: dict[str, None]) -> list[str]:
    workspaces = {w.name for w in plan.workspaces}
    arguments = []
    for name, kind in zip(launch.args, launch.kinds, strict=True):
        if name in workspaces:
            arguments.append(f"{name}.data_ptr()")
        elif kind == "q" and name.isidentifier():  # `_plan_function` prepares expressions
            used[name] = None
            arguments.append(_local(name))
        else:
            arguments.append(name)
    return arguments


def _local(name: str) -> str:
    """The local variable of a name: `size_m` for a dim `M`, lower case for a stride.

    The prefix keeps a dim `M` apart from a tensor `m`.
    """
    return f"size_{name.lower()}" if name != name.lower() and "_stride_" not in name \
        else name.lower()


def renamed(text: str, rename: Callable[[str], str]) -> str:
    """Return an expression with its free names replaced."""
    free = names_in(text)

    class Rename(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id not in free:
                return node
            return ast.parse(rename(node.id), mode="eval").body

    return ast.unparse(Rename().visit(ast.parse(text, mode="eval").body))


def _joined(conditions: Sequence[str]) -> str:
    """A `return` statement with the conjunction of all conditions; empty if there are none."""
    parts = [renamed(text, lambda name: f"call.{name}") for text in conditions]
    if not parts:
        return ""
    if len(parts) == 1:
        return f"return {wrapped(parts[0], INDENT, len('return '))}"
    lines = f"\n{' ' * 8}and ".join(_grouped(part) for part in parts)
    return f"return (\n{' ' * 8}{lines}\n{' ' * 4})"


def _grouped(part: str) -> str:
    """A part of a conjunction, in parentheses if it needs them or takes several lines."""
    whole = wrapped(part, 2 * INDENT, len("and "))
    is_loose = " or " in part or " if " in part
    return f"({part})" if is_loose and whole == part else whole
