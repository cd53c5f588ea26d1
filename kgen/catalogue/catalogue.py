"""Discover operators: kgen's own and the user's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kgen.assets import Root, builtin_root, user_roots
from kgen.catalogue.gradients import links_of
from kgen.catalogue.spaces import load_space
from kgen.catalogue.user_functions import check_declaration, with_clear_errors, without_exit
from kgen.errors import CatalogueError, suggest
from kgen.model.space import Space
from kgen.operators.base import Operator

# kgen's own search spaces are read once per process, because reading one takes 30 to 100 ms.
_load_own_space = cache(load_space)
_NO_OPERATORS = ("__init__", "base")
# Names that no operator may have: the library's other public names, and the names that the
# generated module of an operator uses.
RESERVED_NAMES = frozenset({
    "annotations", "base", "capture", "ceil_div", "compat", "dense_like", "dispatch_modes",
    "explain", "forward_ad", "min", "misses", "namedtuple", "nn", "only", "patch", "present",
    "register", "selftest", "torch", "transforms", "type", "warmup", "written",
})


@dataclass(frozen=True)
class Entry:
    """An operator with its search space and the folder of its templates."""

    operator: Operator
    space: Space
    templates: Path
    root: Root


class Catalogue:
    """All operators of the given roots; a user's operator hides kgen's operator of that name."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self.roots = tuple(roots)
        self._files: dict[str, tuple[Root, Path]] = {}
        for root in reversed(roots):  # earlier roots win
            for file in sorted(root.operators.glob("*.py")):
                if file.stem not in _NO_OPERATORS and not file.stem.startswith("_"):
                    self._files[file.stem] = (root, file)

    @property
    def names(self) -> list[str]:
        """Names of all operators, sorted."""
        return sorted(self._files)

    def operator(self, name: str) -> Operator:
        """Load an operator by name or alias, without its search space.

        Raises:
            CatalogueError: If the operator does not exist or its module does not load.
        """
        if name in self._files:
            return self._load(name)
        aliases = {alias: own for own in self.names for alias in self._load(own).aliases}
        if name in aliases:
            return self._load(aliases[name])
        raise CatalogueError(
            f"unknown operator '{name}'\n  {suggest(name, [*self.names, *aliases])}"
            "\n  an operator of your own: --path DIR, see "
            "docs/tutorials/new-operator.md"
        )

    def entry(self, name: str) -> Entry:
        """Load an operator with its search space and templates.

        Raises:
            CatalogueError: If a file is missing.
            SpaceError: If the search space is malformed.
        """
        operator = self.operator(name)
        root, _ = self._files[operator.name]
        space_file = root.search_spaces / f"{operator.name}.yaml"
        if not space_file.is_file():
            raise CatalogueError(
                f"operator '{operator.name}' has no search space\n  expected: {space_file}"
            )
        # Reports quote rules with `file:line`. A path relative to kgen is the same in every
        # checkout.
        shown_as = f"search_spaces/{space_file.name}" if root.builtin else ""
        load = _load_own_space if root.builtin else load_space
        space = load(space_file, operator.name, operator.signature, shown_as, root.templates)
        return Entry(operator, space, root.templates / space.template_folder, root)

    def _load(self, name: str) -> Operator:
        root, file = self._files[name]
        if name in RESERVED_NAMES:
            raise CatalogueError(
                f"{file}: no operator can be named '{name}': the library needs that name\n"
                "  next: rename the file, its OPERATOR, its templates and its search space"
            )
        module_name = f"kgen.operators.{name}" if root.builtin else f"kgen_user_{name}"
        try:
            if root.builtin:
                module = importlib.import_module(module_name)
            else:
                spec = importlib.util.spec_from_file_location(module_name, file)
                assert spec is not None, file
                assert spec.loader is not None, file
                module = importlib.util.module_from_spec(spec)
                sys.modules[module_name] = module  # dataclasses look up their module there
                with without_exit():
                    spec.loader.exec_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # a user's module may raise anything
            raise CatalogueError(
                f"{file}: the operator module does not load\n  {type(problem).__name__}: {problem}"
            ) from problem
        operator = getattr(module, "OPERATOR", None)
        if not isinstance(operator, Operator):
            raise CatalogueError(f"{file}: defines no OPERATOR = Operator(...)")
        if operator.name != name:
            raise CatalogueError(f"{file}: OPERATOR.name is '{operator.name}', expected '{name}'")
        if not root.builtin:
            check_declaration(operator, file)
        links_of(operator)  # refuse gradients that autograd cannot use before any tune
        return operator if root.builtin else with_clear_errors(operator)


def open_catalogue(paths: Sequence[str | Path] = ()) -> Catalogue:
    """Open kgen's own operators and those of `paths` and KGEN_PATH.

    Raises:
        CatalogueError: If a path is no folder.
    """
    return Catalogue([*user_roots(paths), builtin_root()])
