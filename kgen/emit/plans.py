"""The plan functions of a generated table: one per distinct variant, config and bound plan."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from kgen.emit.binding import LaunchText, PlanText, functions_in, names_in
from kgen.emit.layout import docstring, fold, quoted, wrapped
from kgen.emit.state import RowState, SafeState
from kgen.model.config import Value, spell
from kgen.model.signature import Pass

INDENT = 4


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


def config_label(variant: str, config: Iterable[tuple[str, Value]]) -> str:
    """`variant(a=1, b=2)`, for people."""
    return f"{variant}({', '.join(f'{name}={spell(value)}' for name, value in config)})"


def plan_functions(
    rows: Iterable[RowState | SafeState], passes: Mapping[str, Pass], facts: frozenset[str]
) -> tuple[dict[tuple[object, ...], PlanFunction], frozenset[str]]:
    """Return the plan functions of rows by `plan_key`, and the helpers that they call.

    Args:
        rows: Of one generated module, in order.
        passes: The operator's passes by name.
        facts: Names of GPU facts that are still free (in safe plans).
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
        functions[key] = _plan_function(name, label, row.plan, passes[row.pass_name], facts)
        helpers |= functions[key].helpers
    return functions, frozenset(helpers)


def plan_key(row: RowState | SafeState) -> tuple[object, ...]:
    """Rows of equal keys share a plan function."""
    return (row.pass_name, row.variant, row.config, row.plan)


def _plan_function(
    name: str, label: str, plan: PlanText, passed: Pass, facts: frozenset[str]
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
        if launch.early:
            options.append("overlaps=True")  # whatever is before it in its stream
        elif launch.overlaps:
            options.append(f"overlaps={_any_launched(grids)}")
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
    parts = [renamed(text, lambda n: f"call.{n}") for text in plan.conditions]
    for text in plan.conditions:
        helpers |= functions_in(text)
    return PlanFunction(
        name=name,
        doc=docstring(label, INDENT),
        lines=(*names, *prepared),
        scratch=tuple(scratch),
        run_head=fold("def run(", ["stream: int", *parameters], ") -> None:", INDENT),
        launches=tuple(launches),
        condition=_joined(parts) if parts else "",
        fits=f"{name}_fits" if parts else "always",
        helpers=frozenset(helpers),
    )


def _any_launched(grids: list[list[str]]) -> str:
    """Whether any launch before has a block: the first that has one must not overlap."""
    extents = [[extent for extent in grid if not extent.isdecimal()] for grid in grids
               if "0" not in grid]
    if not extents:
        return "False"
    if not all(extents):
        return "True"
    return " or ".join(" and ".join(f"{extent} > 0" for extent in grid) for grid in extents)


def _arguments(launch: LaunchText, plan: PlanText, used: dict[str, None]) -> list[str]:
    workspaces = {w.name for w in plan.workspaces}
    arguments = []
    for name, kind in zip(launch.args, launch.kinds, strict=True):
        if name in workspaces:
            arguments.append(f"{name}.data_ptr()")
        elif kind == "q" and name.isidentifier():  # an expression is the caller's to prepare
            used[name] = None
            arguments.append(_local(name))
        else:
            arguments.append(name)
    return arguments


def _local(name: str) -> str:
    """A dim `M` is the local `size_m`, so that it cannot be a tensor `m`; strides go lower-case."""
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


def _joined(parts: list[str]) -> str:
    if len(parts) == 1:
        return f"return {wrapped(parts[0], INDENT, len('return '))}"
    grouped = [f"({part})" if " or " in part or " if " in part else part for part in parts]
    lines = f"\n{' ' * 8}and ".join(wrapped(part, 2 * INDENT, len("and ")) for part in grouped)
    return f"return (\n{' ' * 8}{lines}\n{' ' * 4})"
