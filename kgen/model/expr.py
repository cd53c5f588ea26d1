"""The expression language of search spaces: a whitelisted part of Python's, never `eval`ed.

Integers, floats, strings, booleans, names; + - * // % **; comparisons, `in (…)`, and/or/not,
`a if c else b`; calls of ceil_div, round_up, next_pow2, is_pow2, min, max. An expression is
parsed once to a tree of closures (fast enough to filter a million configs) and can be printed
as plain Python for the generated library.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kgen.errors import ExprError, suggest
from kgen.runtime.arith import ceil_div, is_pow2, next_pow2, round_up

Env = Mapping[str, Any]
_Closure = Callable[[Env], Any]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": ceil_div,
    "round_up": round_up,
    "next_pow2": next_pow2,
    "is_pow2": is_pow2,
    "min": min,
    "max": max,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
# A typing slip such as 9**9**9 must not hang a tune.
MAX_POWER = 64


@dataclass(frozen=True, slots=True)
class Expr:
    """A parsed expression.

    Attributes:
        text: Normalised source; equal texts are equal expressions.
        names: Free names, without the functions.
    """

    text: str
    names: frozenset[str]
    _closure: _Closure = field(compare=False, repr=False)

    def __call__(self, env: Env) -> Any:
        """Evaluate in `env`.

        Raises:
            ExprError: If a name is missing or the arithmetic is impossible (x // 0).
        """
        try:
            return self._closure(env)
        except KeyError as missing:
            raise ExprError(f"'{self.text}' uses {missing}, which has no value here") from None
        except (ArithmeticError, TypeError, ValueError) as problem:
            raise ExprError(f"'{self.text}' cannot be evaluated: {problem}") from None

    def __reduce__(self) -> tuple[Callable[[str], Expr], tuple[str]]:
        return parse_expr, (self.text,)  # closures do not pickle; the text says it all


def parse_expr(source: str | int | float | bool) -> Expr:
    """Parse an expression.

    Raises:
        ExprError: On syntax outside the language; names the offending part.
    """
    return _parse(str(source))


# Every trial sends its variant to the worker, and a variant has dozens of expressions: parsing them
# again each time took a tenth of a trial.
@lru_cache(maxsize=4096)
def _parse(text: str) -> Expr:
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as problem:
        raise ExprError(f"'{text}' is not an expression: {problem.msg}") from None
    names: set[str] = set()
    closure = _compile(tree, names, text)
    return Expr(ast.unparse(tree), frozenset(names), closure)


def _compile(node: ast.expr, names: set[str], text: str) -> _Closure:
    def sub(child: ast.expr) -> _Closure:
        return _compile(child, names, text)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() as constant):
            return lambda env: constant
        case ast.Name(id=name):
            if name in FUNCTIONS:
                raise ExprError(f"'{text}': '{name}' is a function; call it")
            names.add(name)
            return lambda env: env[name]
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = sub(left), sub(right)
            return lambda env: _power(base(env), power(env))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            apply, a, b = _BINARY[type(op)], sub(left), sub(right)
            return lambda env: apply(a(env), b(env))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = sub(operand)
            return lambda env: -value(env)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = sub(operand)
            return lambda env: not value(env)
        case ast.BoolOp(op=op, values=values):
            parts = [sub(value) for value in values]
            if isinstance(op, ast.And):
                return lambda env: all(part(env) for part in parts)
            return lambda env: any(part(env) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARE for op in ops
        ):
            first = sub(left)
            links = [(_COMPARE[type(op)], sub(o)) for op, o in zip(ops, others, strict=True)]
            return lambda env: _chain(env, first, links)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            condition, then, other = sub(test), sub(body), sub(orelse)
            return lambda env: then(env) if condition(env) else other(env)
        case ast.Tuple(elts=elts) | ast.List(elts=elts):
            items = [sub(item) for item in elts]
            return lambda env: tuple(item(env) for item in items)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name not in FUNCTIONS:
                raise ExprError(f"'{text}' calls '{name}'\n  {suggest(name, FUNCTIONS)}")
            function, arguments = FUNCTIONS[name], [sub(arg) for arg in args]
            return lambda env: function(*(argument(env) for argument in arguments))
    raise ExprError(
        f"'{text}': '{ast.unparse(node)}' is not allowed here\n"
        "  allowed: numbers, names, strings, + - * // % **, comparisons, in, and/or/not, "
        f"'a if c else b', and {', '.join(FUNCTIONS)}"
    )


def _power(base: Any, power: Any) -> Any:
    if abs(power) > MAX_POWER:
        raise ValueError(f"power {power} is beyond {MAX_POWER}")
    return base**power


def _chain(
    env: Env, first: _Closure, links: list[tuple[Callable[[Any, Any], Any], _Closure]]
) -> bool:
    left = first(env)
    for compare, closure in links:
        right = closure(env)
        if not compare(left, right):
            return False
        left = right
    return True
