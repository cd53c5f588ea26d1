"""The expression language of search spaces: a whitelisted subset of Python, without `eval`.

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
from kgen.runtime.arith import MAX_POWER, ceil_div, is_pow2, next_pow2, round_up

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
# Limits against typing errors such as 9**9**9 and against hostile expressions.
MAX_BITS = 4096  # of an integer power
MAX_CHARS = 20_000  # of an expression with its lets expanded


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
        return parse_expr, (self.text,)  # closures do not pickle; the text suffices


class Names(dict[str, Any]):
    """Values of names. A `let` is computed at its first use and then cached."""

    def __init__(self, values: Env, lets: Mapping[str, Expr]) -> None:
        super().__init__(values)
        self._lets = lets

    def __missing__(self, name: str) -> Any:
        if name not in self._lets:
            raise KeyError(name)
        value = self[name] = self._lets[name](self)
        return value


def base_names(expr: Expr, lets: Mapping[str, Expr]) -> frozenset[str]:
    """The names that an expression depends on, with its lets expanded."""
    found: set[str] = set()
    for name in expr.names:
        found |= base_names(lets[name], lets) if name in lets else {name}
    return frozenset(found)


def inlined(expr: Expr, lets: Mapping[str, Expr]) -> Expr:
    """The expression with every let expanded."""
    if not any(name in lets for name in expr.names):
        return expr

    class Inline(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            if node.id not in lets:
                return node
            return ast.parse(inlined(lets[node.id], lets).text, mode="eval").body

    return parse_expr(ast.unparse(Inline().visit(ast.parse(expr.text, mode="eval").body)))


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
    if len(text) > MAX_CHARS:
        raise ExprError(
            f"'{text[:40]}...' is too long: {len(text)} characters, {MAX_CHARS} are allowed"
        )
    names: set[str] = set()
    try:
        tree = ast.parse(text, mode="eval").body
        closure = _compile(tree, names, text)
        return Expr(ast.unparse(tree), frozenset(names), closure)
    except SyntaxError as problem:
        raise ExprError(f"'{text}' is not an expression: {problem.msg}") from None
    except (RecursionError, MemoryError, ValueError) as problem:
        raise ExprError(
            f"'{text[:40]}' is not an expression: {problem or type(problem).__name__}"
        ) from None


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
            _demand_numbers(left, right, text)
            base, power = sub(left), sub(right)
            if _is_constant(node):  # generated Python computes it without a limit
                try:
                    _power(base({}), power({}))
                except (ArithmeticError, TypeError, ValueError) as problem:
                    raise ExprError(f"'{text}' cannot be evaluated: {problem}") from None
            return lambda env: _power(base(env), power(env))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _demand_numbers(left, right, text)
            return _arithmetic(_BINARY[type(op)], sub(left), sub(right))
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
    if abs(_number(power)) > MAX_POWER:
        raise ValueError(f"power {power} is beyond {MAX_POWER}")
    if isinstance(base, int) and base.bit_length() * abs(power) > MAX_BITS:
        raise ValueError(f"a power of more than {MAX_BITS} bits")
    return _number(base) ** power


def _arithmetic(apply: Callable[[Any, Any], Any], left: _Closure, right: _Closure) -> _Closure:
    """Most values are ints, which need no look: a search evaluates millions of expressions."""

    def evaluate(env: Env) -> Any:
        a, b = left(env), right(env)
        if type(a) is int and type(b) is int:
            return apply(a, b)
        return apply(_number(a), _number(b))

    return evaluate


def _number(value: Any) -> Any:
    """Texts and lists cannot be calculated with: `'a' * 10**11` would take all memory."""
    if isinstance(value, str | tuple):
        raise TypeError(f"{value!r:.40} is no number")
    return value


def _demand_numbers(left: ast.expr, right: ast.expr, text: str) -> None:
    for operand in (left, right):
        is_text = isinstance(operand, ast.Constant) and isinstance(operand.value, str)
        if is_text or isinstance(operand, ast.Tuple | ast.List):
            raise ExprError(
                f"'{text[:40]}': '{ast.unparse(operand)[:40]}' is no number to calculate with"
            )


def _is_constant(node: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name) for part in ast.walk(node))


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
