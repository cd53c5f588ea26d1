"""Expressions of a search space, and the lets that they may use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from kgen.catalogue.yaml_tree import Tree
from kgen.errors import ExprError, SpaceError, suggest
from kgen.model.config import Value
from kgen.model.expr import Expr, parse_expr


class Scope:
    """The names that the expressions of one variant may use."""

    def __init__(
        self,
        lets: Mapping[str, Tree],
        settings: Mapping[str, Value],
        static: Sequence[str],
        at_call: Sequence[str],
    ) -> None:
        """
        Args:
            lets: The visible lets, by name.
            settings: Names with a fixed value.
            static: Names known before a call: those of the problem, the parameters and the GPU.
            at_call: The static names, and the names that only a guard may use.
        """
        self._trees = lets
        self._static = dict.fromkeys(static)
        self._at_call = dict.fromkeys(at_call)
        self._settings = settings
        self._lets: dict[str, Expr] = {}
        self.used_places: set[tuple[str, int]] = set()

    @property
    def let_names(self) -> list[str]:
        """Names of lets and settings."""
        return [*self._settings, *self._trees]

    @property
    def lets(self) -> tuple[tuple[str, Expr], ...]:
        """The used lets, each after the lets that it uses."""
        return tuple(self._lets.items())

    def expr(
        self,
        tree: Tree,
        *,
        at_call: bool = False,
        only: Iterable[str] | None = None,
        allow: Iterable[str] = (),
        what: str = "",
    ) -> Expr:
        """Parse an expression.

        Args:
            tree: The YAML node that declares it.
            at_call: Whether pointers and strides may be used.
            only: Allowed names besides lets and settings; default: all.
            allow: Further allowed names.
            what: How the message about a name that is not allowed begins.

        Raises:
            SpaceError: If the text is no expression, or uses a name that is not allowed.
        """
        known = dict.fromkeys(only) if only is not None else (
            self._at_call if at_call else self._static
        )
        return self._checked(_parse(tree.text(), tree), tree, {**known, **dict.fromkeys(allow)},
                             (), what)

    def parsed(self, text: str, tree: Tree) -> Expr:
        """Parse an expression that is a part of the YAML node `tree`."""
        return self._checked(_parse(text, tree), tree, self._static, (), "")

    def named(self, name: str, tree: Tree) -> Expr:
        """The expression that consists of a name alone."""
        return self._checked(parse_expr(name), tree, {**self._static, **self._at_call}, (), "")

    def _checked(
        self, expr: Expr, tree: Tree, known: Mapping[str, None], open_: tuple[str, ...], what: str
    ) -> Expr:
        for name in sorted(expr.names):
            if name in self._settings:
                self._lets.setdefault(name, parse_expr(repr(self._settings[name])))
            elif name in self._trees:
                self._let(name, tree, known, open_, what)
            elif name not in known:
                hint = suggest(name, [*known, *self.let_names])
                begin = what or f"'{expr.text}' uses"
                unknown = f"'{name}' is no parameter" if what else f"unknown name '{name}'"
                raise tree.fail(f"{begin} {unknown}\n  {hint}")
        return expr

    def _let(
        self, name: str, user: Tree, known: Mapping[str, None], open_: tuple[str, ...], what: str
    ) -> None:
        tree = self._trees[name]
        if name in open_:
            cycle = " -> ".join((*open_[open_.index(name) :], name))
            raise tree.fail_at_key(f"let '{name}' is defined by itself: {cycle}")
        self.used_places.add(tree.place)
        expr = _parse(tree.text(), tree)
        try:
            self._checked(expr, tree, known, (*open_, name), what)
        except SpaceError as problem:
            if open_ or user.where == tree.where:
                raise
            raise SpaceError(f"{problem}\n  used at {user.where}") from None
        self._lets.setdefault(name, expr)


def value_of(tree: Tree) -> Value:
    """A choice of a parameter, or the value of a setting."""
    value = tree.scalar()
    if value is None:
        # YAML 1.1 reads `none` as text but `null` and an empty entry as nothing.
        raise tree.fail("a choice may not be empty or null")
    if isinstance(value, float) and not math.isfinite(value):
        raise tree.fail(f"'{tree.text()}' is no finite number")
    return value


def _parse(text: str, tree: Tree) -> Expr:
    try:
        return parse_expr(text)
    except ExprError as problem:
        raise tree.fail(str(problem)) from None
