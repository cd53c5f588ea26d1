"""Bind the launch expressions and conditions of a variant to a config, dtypes, GPU and fixed dims.

Parameters, dtypes, GPU facts and compiled-in dims become literals, and constants are folded. The
remaining expression is printed over the names of a call's numbers: run-time dims, strides,
pointers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kgen.errors import SpaceError
from kgen.model.config import Value
from kgen.model.dtypes import DTYPES
from kgen.model.expr import FUNCTIONS, Expr, parse_expr
from kgen.model.plan import MAX_GRID
from kgen.model.signature import Pass
from kgen.model.space import LaunchSpec, RuleKind, Variant
from kgen.runtime.spelling import itemsizes

# The lookup key of the library holds each pointer modulo this many bytes.
MAX_ALIGNMENT = 32
_ALIGNMENTS = tuple(2**k for k in range(MAX_ALIGNMENT.bit_length()))


@dataclass(frozen=True, slots=True)
class BoundLaunch:
    """One launch; every expression is Python over run-time names."""

    kernel: str
    grid: tuple[str, str, str]
    block: tuple[str, str, str]
    smem: str
    args: tuple[str, ...]
    kinds: str  # one letter per argument: p(ointer), q (int64), f(loat32)
    pdl: bool | str = False  # programmatic dependent launch: yes or no; for a family, a condition
    coresident: bool = False  # whether its CTAs wait for each other at grid barriers


@dataclass(frozen=True, slots=True)
class BoundWorkspace:
    """Scratch memory: `elements` of a torch dtype."""

    name: str
    dtype: str
    elements: str


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """A plan as text; plans of equal text share one function of the generated table."""

    launches: tuple[BoundLaunch, ...]
    workspaces: tuple[BoundWorkspace, ...] = ()
    conditions: tuple[str, ...] = field(default=())


def literals(
    dims: Mapping[str, int], dtypes: Mapping[str, str], config: Mapping[str, Value],
    facts: Mapping[str, int],
) -> dict[str, Any]:
    """Values of all names that are constant in a kernel; `config` has all parameters."""
    values: dict[str, Any] = {**facts, **dims, **dtypes, **config}
    return values | itemsizes(dtypes.items())


def absent_literals(passed: Pass, dtypes: Mapping[str, str]) -> dict[str, int]:
    """Pointers and strides of the tensors that a problem leaves out."""
    values: dict[str, int] = {}
    for tensor in passed.tensors:
        if tensor not in passed.present(dtypes).tensors:
            values[f"{tensor.name}_ptr"] = 0
            values |= {f"{tensor.name}_stride_{dim}": 0 for dim in tensor.free_strides}
    return values


def bound_plan(variant: Variant, passed: Pass, fixed: Mapping[str, Any]) -> BoundPlan:
    """Print a variant's plan and conditions with the fixed names replaced by their values.

    Efficiency rules do not become conditions. They only select the configs that are worth a trial;
    a row that breaks one still serves a call better than the safe kernel.

    Raises:
        SpaceError: If a guard uses more of a pointer than its alignment.
    """
    launches = tuple(_launch(spec, variant, passed, fixed) for spec in variant.launches)
    workspaces = tuple(
        BoundWorkspace(w.name, DTYPES[fixed.get(w.dtype, w.dtype)].torch,
                      bound(variant.inlined(w.elements), fixed))
        for w in variant.workspaces
    )
    conditions = dict.fromkeys(_conditions(variant, RuleKind.LEGALITY, fixed))
    for launch in launches:
        for extent, limit in zip(launch.grid[1:], MAX_GRID[1:], strict=True):
            if not extent.isdecimal():
                conditions[f"{extent} <= {limit}"] = None
    return BoundPlan(launches, workspaces, tuple(conditions))


def bound_preferences(variant: Variant, fixed: Mapping[str, Any]) -> tuple[str, ...]:
    """Print the efficiency rules of a variant with the fixed names replaced by their values."""
    return tuple(dict.fromkeys(_conditions(variant, RuleKind.EFFICIENCY, fixed)))


def _conditions(variant: Variant, kind: RuleKind, fixed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the conditions of the rules of a kind, without those that always hold."""
    for rule in (*variant.requires, *variant.guards):
        if rule.kind is not kind:
            continue
        for part in _conjuncts(_parsed(bound(variant.inlined(rule.condition), fixed))):
            for modulus in _moduli(part, rule.where):
                yield f"{modulus} in {(0, *_ALIGNMENTS)}"  # 0: the modulus of an absent tensor
            if (text := ast.unparse(part)) != "True":
                yield text


def bound(expr: Expr, fixed: Mapping[str, Any]) -> str:
    """Return an expression as text with the fixed names replaced and constants folded."""
    return ast.unparse(_Fold(fixed).visit(ast.parse(expr.text, mode="eval").body))


def names_in(text: str) -> set[str]:
    """Free names of a bound expression, without the functions."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval"))
            if isinstance(node, ast.Name) and node.id not in FUNCTIONS}


def functions_in(text: str) -> set[str]:
    """Names of the integer helpers that a bound expression calls, without Python's own."""
    called = {node.id for node in ast.walk(ast.parse(text, mode="eval"))
              if isinstance(node, ast.Name) and node.id in FUNCTIONS}
    return called - {"min", "max"}


def _launch(
    spec: LaunchSpec, variant: Variant, passed: Pass, fixed: Mapping[str, Any]
) -> BoundLaunch:
    pointers = {t.name for t in passed.tensors} | {w.name for w in variant.workspaces}
    scalars = {s.name for s in passed.scalars}
    kinds = "".join(
        "p" if arg in pointers else "f" if arg in scalars else "q" for arg in spec.args
    )
    grid, block = (
        tuple(bound(variant.inlined(e), fixed) for e in extents) + ("1",) * (3 - len(extents))
        for extents in (spec.grid, spec.block)
    )
    args = tuple(
        bound(variant.inlined(arg), fixed) if isinstance(arg, Expr)
        else str(fixed[arg]) if kind == "q" and arg in fixed else arg
        for arg, kind in zip(spec.args, kinds, strict=True)
    )
    return BoundLaunch(spec.kernel, (grid[0], grid[1], grid[2]), (block[0], block[1], block[2]),
                      bound(variant.inlined(spec.smem), fixed), args, kinds,
                      _pdl(spec, variant, fixed), spec.coresident)


def _pdl(spec: LaunchSpec, variant: Variant, fixed: Mapping[str, Any]) -> bool | str:
    if spec.pdl is None:
        return False
    text = bound(variant.inlined(spec.pdl), fixed)
    return text if names_in(text) else bool(parse_expr(text)({}))


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


class _Fold(ast.NodeTransformer):
    """Replace fixed names by literals, and evaluate subexpressions that have become constant."""

    def __init__(self, fixed: Mapping[str, Any]) -> None:
        self.fixed = fixed

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.fixed[node.id]) if node.id in self.fixed else node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node.args = [self.visit(arg) for arg in node.args]  # node.func stays a name
        match node:
            case ast.Call(func=ast.Name(id="ceil_div" | "round_up"),
                          args=[ast.expr() as whole, ast.Constant(value=1)]):
                return whole
        return self._computed(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        absorbing = isinstance(node.op, ast.Or)
        kept = []
        for value in map(self.visit, node.values):
            if isinstance(value, ast.Constant):
                if bool(value.value) == absorbing:
                    return ast.Constant(absorbing)
                continue
            kept.append(value)
        if not kept:
            return ast.Constant(not absorbing)
        return kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        test: ast.expr = self.visit(node.test)
        if isinstance(test, ast.Constant):
            chosen: ast.expr = self.visit(node.body if test.value else node.orelse)
            return chosen
        return ast.IfExp(test, self.visit(node.body), self.visit(node.orelse))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        node = super().generic_visit(node)
        return self._computed(node) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare) \
            else node

    def _computed(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and (
            isinstance(node.right, ast.Constant) and node.right.value == 1
        ):
            return ast.Constant(0)
        text = ast.unparse(node)
        return node if names_in(text) else ast.Constant(parse_expr(text)({}))


def _conjuncts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return [part for value in node.values for part in _conjuncts(value)]
    return [node]


def _moduli(condition: ast.expr, where: str) -> Iterator[str]:
    """Yield the moduli of pointers in a condition; at a call each must be an alignment.

    Raises:
        SpaceError: If a condition cannot be decided from pointers modulo `MAX_ALIGNMENT`.
    """
    allowed: set[int] = set()
    for node in ast.walk(condition):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mod):
            continue
        pointers = [name for name in _congruent(node.left) if name.id.endswith("_ptr")]
        if isinstance(node.right, ast.Constant):
            if node.right.value not in _ALIGNMENTS:
                continue
        elif pointers:
            yield ast.unparse(node.right)
        allowed |= {id(name) for name in pointers}
    for node in ast.walk(condition):
        if isinstance(node, ast.Name) and node.id.endswith("_ptr") and id(node) not in allowed:
            raise SpaceError(
                f"{where}: guard '{ast.unparse(condition)}' uses '{node.id}' outside of "
                f"'{node.id} % n', or a sum of pointers % n, with n a power of two up to "
                f"{MAX_ALIGNMENT}\n  the generated library knows only the alignment of a pointer"
            )


def _congruent(node: ast.expr) -> list[ast.Name]:
    """Names in a sum or product, whose value modulo n depends only on the names' values modulo n.
    """
    if isinstance(node, ast.Name):
        return [node]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult):
        return _congruent(node.left) + _congruent(node.right)
    return []
