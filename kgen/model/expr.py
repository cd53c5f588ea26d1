"""The expression language of search spaces: a whitelisted subset of Python.

Integers, floats, strings, booleans, names; + - * // % **; comparisons, `in (…)`, and/or/not,
`a if c else b`; calls of ceil_div, round_up, next_pow2, is_pow2, min, max. An expression is
checked node by node, rewritten so that its names are read from a mapping, and compiled once to a
Python function, because a search evaluates millions of expressions. The generated library contains
expressions as plain Python, with the same meaning.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from kgen.errors import ExprError, suggest
from kgen.runtime.arith import MAX_POWER, ceil_div, is_pow2, next_pow2, round_up

Env = Mapping[str, Any]
_Function = Callable[[Env], Any]

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "ceil_div": ceil_div,
    "round_up": round_up,
    "next_pow2": next_pow2,
    "is_pow2": is_pow2,
    "min": min,
    "max": max,
}
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARE = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn)
# Nodes whose result is a number, whatever their operands are.
_NUMERIC = (ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare)
_ENV, _POWER = "env", "_power"  # in compiled expressions
# Limits against typing errors such as 9**9**9 and against hostile expressions.
MAX_BITS = 4096  # bits of an integer power
MAX_CHARS = 20_000  # length of an expression with its lets expanded


@dataclass(frozen=True, slots=True)
class Expr:
    """A parsed expression.

    Attributes:
        text: Normalised source; equal texts are equal expressions.
        names: Free names, without the functions.
    """

    text: str
    names: frozenset[str]
    _function: _Function = field(compare=False, repr=False)

    def __call__(self, env: Env) -> Any:
        """Evaluate in `env`.

        Raises:
            ExprError: If a name is missing or the arithmetic is impossible (x // 0).
        """
        try:
            return self._function(env)
        except KeyError as missing:
            raise ExprError(f"'{self.text}' uses {missing}, which has no value here") from None
        except (ArithmeticError, TypeError, ValueError) as problem:
            texts = ", ".join(
                f"{name} is {env[name]!r:.40}, no number" for name in sorted(self.names)
                if isinstance(env.get(name), str | tuple)
            )
            raise ExprError(
                f"'{self.text}' cannot be evaluated: {problem}{f' ({texts})' if texts else ''}"
            ) from None

    def __reduce__(self) -> tuple[Callable[[str], Expr], tuple[str]]:
        return parse_expr, (self.text,)  # functions do not pickle; the text suffices


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


# Every trial sends its variant, with dozens of expressions, to the worker. Parsing all of them in
# each trial took a tenth of the trial's time.
@lru_cache(maxsize=16384)
def _parse(text: str) -> Expr:
    if len(text) > MAX_CHARS:
        raise ExprError(
            f"'{text[:40]}...' is too long: {len(text)} characters, {MAX_CHARS} are allowed"
        )
    names: set[str] = set()
    try:
        tree = ast.parse(text, mode="eval").body
        function = _compiled(_rewritten(tree, names, text))
        return Expr(ast.unparse(tree), frozenset(names), function)
    except SyntaxError as problem:
        raise ExprError(f"'{text}' is not an expression: {problem.msg}") from None
    except (RecursionError, MemoryError, ValueError) as problem:
        raise ExprError(
            f"'{text[:40]}' is not an expression: {problem or type(problem).__name__}"
        ) from None


def _rewritten(node: ast.expr, names: set[str], text: str) -> ast.expr:
    """Check a node, and return it with names read from the mapping and powers limited."""

    def sub(child: ast.expr) -> ast.expr:
        return _rewritten(child, names, text)

    def number(child: ast.expr) -> ast.expr:
        """An operand with a unary plus, which keeps a number as it is and fails on a text or list.

        Without the plus `dtype * 10**11` would repeat a text and take all memory.
        """
        value = sub(child)
        return value if isinstance(child, _NUMERIC) else ast.UnaryOp(ast.UAdd(), value)

    match node:
        case ast.Constant(value=bool() | int() | float() | str()):
            return node
        case ast.Name(id=name):
            if name in FUNCTIONS:
                raise ExprError(f"'{text}': '{name}' is a function; call it")
            names.add(name)
            return ast.Subscript(
                ast.Name(_ENV, ast.Load()), ast.Constant(name), ast.Load())
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            _demand_numbers(left, right, text)
            power = ast.Call(ast.Name(_POWER, ast.Load()), [number(left), number(right)], [])
            if _is_constant(node):  # generated Python computes it without a limit
                try:
                    _compiled(power)({})
                except (ArithmeticError, TypeError, ValueError) as problem:
                    raise ExprError(f"'{text}' cannot be evaluated: {problem}") from None
            return power
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            _demand_numbers(left, right, text)
            return ast.BinOp(number(left), op, number(right))
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            return ast.UnaryOp(op, sub(operand))
        case ast.BoolOp(op=op, values=values):
            return ast.BoolOp(op, [sub(value) for value in values])
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            isinstance(op, _COMPARE) for op in ops
        ):
            return ast.Compare(sub(left), ops, [sub(other) for other in others])
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ast.IfExp(sub(test), sub(body), sub(orelse))
        case ast.Tuple(elts=elts) | ast.List(elts=elts):
            return ast.Tuple([sub(item) for item in elts], ast.Load())
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            if name not in FUNCTIONS:
                raise ExprError(f"'{text}' calls '{name}'\n  {suggest(name, FUNCTIONS)}")
            return ast.Call(ast.Name(name, ast.Load()), [sub(arg) for arg in args], [])
    raise ExprError(
        f"'{text}': '{ast.unparse(node)}' is not allowed here\n"
        "  allowed: numbers, names, strings, + - * // % **, comparisons, in, and/or/not, "
        f"'a if c else b', and {', '.join(FUNCTIONS)}"
    )


def _compiled(node: ast.expr) -> _Function:
    """Compile an expression that `_rewritten` has checked to a function of the mapping."""
    arguments = ast.arguments([], [ast.arg(_ENV)], None, [], [], None, [])
    tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, node)))
    function: _Function = eval(compile(tree, "<expression>", "eval"), dict(_GLOBALS))
    return function


def _power(base: Any, power: Any) -> Any:
    if abs(power) > MAX_POWER:
        raise ValueError(f"power {power} is beyond {MAX_POWER}")
    if isinstance(base, int) and base.bit_length() * abs(power) > MAX_BITS:
        raise ValueError(f"a power of more than {MAX_BITS} bits")
    return base**power


_GLOBALS = {**FUNCTIONS, _POWER: _power, "__builtins__": {}}


def _demand_numbers(left: ast.expr, right: ast.expr, text: str) -> None:
    for operand in (left, right):
        is_text = isinstance(operand, ast.Constant) and isinstance(operand.value, str)
        if is_text or isinstance(operand, ast.Tuple | ast.List):
            raise ExprError(
                f"'{text[:40]}': '{ast.unparse(operand)[:40]}' is no number to calculate with"
            )


def _is_constant(node: ast.expr) -> bool:
    return not any(isinstance(part, ast.Name) for part in ast.walk(node))
