"""Digests of what a verdict depends on besides the kernel: definition, inputs and guards.

A verdict holds for one definition, certain inputs, and the calls that the variant's guards admit.
When one of these changes, an earlier verdict is void. The digests cover the code of the functions
that are called, and all code in the operators' modules to which they refer, without comments.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

from kgen.model.digest import digest_of
from kgen.model.space import Variant
from kgen.operators.base import Operator

_PLAIN = (bool, int, float, str, bytes, type(None))


def definition_digest(operator: Operator) -> str:
    """Return the digest of an operator's definition, scale, inputs, cases and untouched elements.

    Empty if their source cannot be read: the definition of such records counts as unknown.
    """
    seen: dict[str, str] = {}
    try:
        for called in (
            operator.definition, operator.make_inputs, operator.scale, operator.untouched
        ):
            if called is not None:
                own = inspect.unwrap(called)  # the catalogue wraps a user's functions
                _add(own, _home(own), seen)
    except (OSError, TypeError, SyntaxError):
        return ""
    choices = [operator.cases, operator.slab_dim, operator.widens]
    return digest_of([sorted(seen.items()), repr(choices)])


def trained_digest(operator: Operator) -> str:
    """Return the digest of the function that draws an operator's trained inputs, for timing.

    Times depend on it, verdicts do not, so `definition_digest` does not contain it. Empty if the
    operator declares no trained inputs; `unknown` if the function's source cannot be read.
    """
    if operator.trained is None:
        return ""
    seen: dict[str, str] = {}
    try:
        own = inspect.unwrap(operator.trained)
        _add(own, _home(own), seen)
    except (OSError, TypeError, SyntaxError):
        return "unknown"
    return digest_of(sorted(seen.items()))


def guards_digest(variant: Variant) -> str:
    """Return the digest of a variant's guards, of whether it is nondeterministic or keeps state,
    and of the conditions that need no test.
    """
    guards = [variant.inlined(rule.condition).text for rule in variant.guards]
    untested = [condition for condition, _ in variant.untested]
    return digest_of(
        [guards, bool(variant.nondeterministic), bool(variant.keeps_state), *untested]
    )


def _add(value: Any, home: str, seen: dict[str, str]) -> None:
    """Add the text of a value's code, and of the code to which it refers, to `seen`."""
    if isinstance(value, partial):
        _add(value.func, home, seen)
        seen[f"partial {len(seen)}"] = repr((value.args, sorted(value.keywords.items())))
        return
    if not isinstance(value, FunctionType | type):
        # A callable object: its class and its plain attributes.
        held = getattr(value, "__dict__", {})
        slots = [name for name in getattr(type(value), "__slots__", ()) if hasattr(value, name)]
        held = {**held, **{name: getattr(value, name) for name in slots}}
        seen[f"object {type(value).__qualname__}"] = repr(
            sorted((name, v) for name, v in held.items() if isinstance(v, _PLAIN))
        )
        value = type(value)
    name = f"{value.__module__}.{value.__qualname__}"
    if name in seen:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    seen[name] = canonical(_without_docstrings(tree))
    module = inspect.getmodule(value)
    scope = {} if module is None else vars(module)
    for used in (used for used in _names(tree) if used in scope):
        found = scope[used]
        if isinstance(found, FunctionType | type) and _home(found) == home:
            _add(found, home, seen)
        elif isinstance(found, _PLAIN) or (
            isinstance(found, tuple) and all(isinstance(item, _PLAIN) for item in found)
        ):
            seen[f"{value.__module__}.{used}"] = repr(found)
    if isinstance(value, FunctionType):
        for used, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if isinstance(cell.cell_contents, _PLAIN):
                seen[f"{name} {used}"] = repr(cell.cell_contents)


def _home(value: Any) -> str:
    """The package of a value's module (`kgen.operators`), or the module if it has no package."""
    if isinstance(value, partial):
        return _home(value.func)
    module = getattr(value, "__module__", "") or ""
    return module.rpartition(".")[0] or module


def _names(tree: ast.AST) -> Iterator[str]:
    return iter(sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}))


def canonical(node: Any) -> str:
    """Write a syntax tree as text, identical in all Python versions, without empty or None fields.

    `ast.dump` has one more field since Python 3.12 (`type_params`), and omits empty fields since
    3.13. With it, hosts with different Python versions could not reuse each other's records.
    """
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields)
        spelt = [f"{name}={canonical(v)}" for name, v in fields if v is not None and v != []]
        return f"{type(node).__name__}({', '.join(spelt)})"
    if isinstance(node, list):
        return f"[{', '.join(canonical(item) for item in node)}]"
    return repr(node)


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return tree
