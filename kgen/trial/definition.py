"""Digests of what a verdict depends on besides the kernel: definition, inputs and guards.

A kernel is wrong or right by the definition, on the inputs that are tried, for the calls that its
guards admit. When one of them changes, an earlier verdict says nothing. The digests are of the code
of what is called, and of what that refers to in the operators' modules, without comments.
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

    Empty if their source cannot be read: records then count as of an unknown definition.
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
    """Return the digest of how an operator draws the inputs of a trained model, for timing.

    It belongs to a time, never to a verdict: `definition_digest` does not contain it. Empty if the
    operator declares none; `unknown` if their source cannot be read.
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
    """Return the digest of the calls that a variant admits, and of how its launches may differ."""
    guards = [variant.inlined(rule.condition).text for rule in variant.guards]
    return digest_of([guards, bool(variant.nondeterministic), bool(variant.keeps_state)])


def _add(value: Any, home: str, seen: dict[str, str]) -> None:
    """Add what a value is, and what its code refers to, to `seen`."""
    if isinstance(value, partial):
        _add(value.func, home, seen)
        seen[f"partial {len(seen)}"] = repr((value.args, sorted(value.keywords.items())))
        return
    if not isinstance(value, FunctionType | type):
        # An object that is called: its class, and what it holds.
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
    """The package of an operator's modules: `kgen.operators`, or the module of another."""
    if isinstance(value, partial):
        return _home(value.func)
    module = getattr(value, "__module__", "") or ""
    return module.rpartition(".")[0] or module


def _names(tree: ast.AST) -> Iterator[str]:
    return iter(sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}))


def canonical(node: Any) -> str:
    """Spell a syntax tree, the same in every Python: fields that are empty or None are left out.

    `ast.dump` has a field more since Python 3.12 (`type_params`) and drops empty ones since 3.13:
    hosts with different Pythons would not know each other's records.
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
