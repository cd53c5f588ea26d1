"""Populations from `search_spaces/populations/<name>.yaml`, or from a file of the user's own.

A file lists models with their extents, and calls: an operator, the models that call it, and for
each remaining field of a problem one or more values. A call stands for all combinations. The format
is described in docs/search-spaces.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from pathlib import Path

from kgen.catalogue.catalogue import Catalogue
from kgen.catalogue.yaml_tree import Tree, read_yaml
from kgen.errors import CatalogueError, PopulationError, ProblemError, suggest, with_next_step
from kgen.model.population import Population, PopulationProblem, PublishedModel
from kgen.model.problem import MOST_DIGITS, Problem, parse_problem, read_extent
from kgen.model.signature import Signature

_CALL_KEYS = ("operator", "models", "passes")
_MODEL_KEYS = ("name", "source")
_MOST_PROBLEMS = 10_000  # of one call and one model; a tune of more problems would not end

Values = dict[str, str]  # field of a problem -> its value, as written


@dataclass(frozen=True, slots=True)
class _ModelEntry:
    """An entry of the list of models, with its extents and the places where they are written."""

    model: PublishedModel
    fields: Mapping[str, Tree]
    tree: Tree


def population_names(catalogue: Catalogue) -> list[str]:
    """Names of the populations of all roots, sorted."""
    return sorted(_files(catalogue))


def load_population(name: str, catalogue: Catalogue) -> Population:
    """Load a population by name, or from a file if `name` is a path or ends in `.yaml`.

    Args:
        name: Name or path.
        catalogue: Declares the operators; its roots contain the named populations.
    Raises:
        CatalogueError: If there is no population of that name.
        PopulationError: If the file is malformed; the text has file and line.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        return _load(Path(name).expanduser(), catalogue)
    files = _files(catalogue)
    if name not in files:
        raise CatalogueError(
            f"unknown population '{name}'\n  {suggest(name, files)}"
            "\n  a population of your own: the path of its file, with a / or the ending .yaml; see "
            "docs/search-spaces.md"
        )
    file, is_builtin = files[name]
    return _load(file, catalogue, f"search_spaces/populations/{file.name}" if is_builtin else "")


def _files(catalogue: Catalogue) -> dict[str, tuple[Path, bool]]:
    """By name, the file and whether it is kgen's own; a user's population hides kgen's."""
    return {
        file.stem: (file, root.builtin)
        for root in reversed(catalogue.roots)
        for file in sorted(root.populations.glob("*.yaml"))
    }


def _load(file: Path, catalogue: Catalogue, shown_as: str = "") -> Population:
    try:
        return _loaded(file, catalogue, shown_as)
    except PopulationError as error:
        raise with_next_step(
            error, "mend the file there; docs/search-spaces.md has the format") from None


def _loaded(file: Path, catalogue: Catalogue, shown_as: str) -> Population:
    tree = read_yaml(file, PopulationError, shown_as)
    entries = tree.fields(["doc", "models", "calls"])
    lists = {name: _model_list(tree) for name, tree in entries["models"].mapping().items()}
    calls = entries["calls"].sequence()
    if not lists or not calls:
        empty = entries["calls" if lists else "models"]
        raise empty.fail_at_key("the population is empty\n  next: add a list of models and a call")
    models = dict.fromkeys(entry.model for entry in chain(*lists.values()))
    return Population(
        name=file.stem,
        doc=_filled(entries["doc"], "doc"),
        models=tuple(models),
        entries=_Calls(lists, catalogue).expand(calls, entries["models"]),
    )


def _model_list(tree: Tree) -> list[_ModelEntry]:
    found: dict[str, _ModelEntry] = {}
    for item in tree.sequence():
        entries = item.mapping()
        for key in _MODEL_KEYS:
            if key not in entries:
                raise item.fail(f"'{key}' is missing\n  required: {', '.join(_MODEL_KEYS)}")
        name, source = (_filled(entries[key], key) for key in _MODEL_KEYS)
        if name in found:
            raise item.fail(
                f"model '{name}' is listed twice\n  first: {found[name].tree.where}\n"
                "  next: remove one, or name what differs"
            )
        fields = {key: child for key, child in entries.items() if key not in _MODEL_KEYS}
        found[name] = _ModelEntry(PublishedModel(name, source), fields, item)
    if not found:
        raise tree.fail_at_key("the list of models is empty\n  next: add `{name: .., source: ..}`")
    return list(found.values())


def _filled(tree: Tree, key: str) -> str:
    text = tree.text().strip()
    if not text:
        raise tree.fail_at_key(f"'{key}' is empty\n  next: write it")
    return text


class _Calls:
    """Expands the calls of a file to problems."""

    def __init__(self, lists: Mapping[str, list[_ModelEntry]], catalogue: Catalogue) -> None:
        self._lists = lists
        self._catalogue = catalogue
        self._used: set[str] = set()
        # (operator, pass, problem) -> model -> the entry of `calls` that gives this problem
        self._found: dict[tuple[str, str, Problem], dict[str, Tree]] = {}

    def expand(self, calls: list[Tree], models: Tree) -> tuple[PopulationProblem, ...]:
        for call in calls:
            self._expand(call)
        for name, tree in models.mapping().items():
            if name not in self._used:
                raise tree.fail_at_key(
                    f"no call names the models '{name}'\n  next: name them in a call, or remove "
                    "the list"
                )
        return tuple(PopulationProblem(*key, tuple(by)) for key, by in self._found.items())

    def _expand(self, call: Tree) -> None:
        entries = call.mapping()
        for key in ("operator", "models"):
            if key not in entries:
                raise call.fail(f"'{key}' is missing\n  required: operator, models")
        try:
            operator = self._catalogue.operator(entries["operator"].text())
        except CatalogueError as error:
            raise entries["operator"].fail(str(error)) from None
        signature = operator.signature
        passes = _passes(entries.get("passes"), signature)
        rest = {key: tree for key, tree in entries.items() if key not in _CALL_KEYS}
        axes = _axes(rest, signature, _CALL_KEYS)
        for model in self._models(entries["models"]):
            own = _axes(model.fields, signature, _MODEL_KEYS)
            _refuse_repeats(own, axes, model)
            count = prod(len(choices) for choices in (*own.values(), *axes.values()))
            if count > _MOST_PROBLEMS:
                raise call.fail(f"the call stands for {count} problems of a model, more than "
                                f"{_MOST_PROBLEMS}\n  next: list fewer values")
            for chosen in product(*own.values(), *axes.values()):
                problem = _problem(dict(chain(*(each.items() for each in chosen))), signature, call)
                for pass_name in passes:
                    self._add((operator.name, pass_name, problem), model.model.name, call)

    def _models(self, tree: Tree) -> Iterator[_ModelEntry]:
        for item in _items(tree):
            name = item.text()
            if name not in self._lists:
                raise item.fail(f"unknown list of models '{name}'\n  {suggest(name, self._lists)}")
            self._used.add(name)
            yield from self._lists[name]

    def _add(self, key: tuple[str, str, Problem], model: str, call: Tree) -> None:
        by = self._found.setdefault(key, {})
        if model in by:
            operator, pass_name, problem = key
            raise call.fail(
                f"{operator} {pass_name} {problem} of '{model}' is listed twice\n"
                f"  first: {by[model].where}\n  next: remove it from one of the calls"
            )
        by[model] = call


def _passes(tree: Tree | None, signature: Signature) -> list[str]:
    if tree is None:
        return [p.name for p in signature.passes]
    found: list[str] = []
    for item in _items(tree):
        try:
            name = signature.pass_named(item.text()).name
        except ProblemError as problem:
            raise item.fail(str(problem)) from None
        if name in found:
            raise item.fail(f"pass '{name}' is listed twice\n  next: remove one")
        found.append(name)
    return found


def _axes(
    entries: Mapping[str, Tree], signature: Signature, keys: tuple[str, ...]
) -> dict[str, list[Values]]:
    """The values of each entry; `B T: [[8, 512], [1, 4096]]` gives two fields joint values."""
    written: set[str] = set()
    axes = {}
    for key, tree in entries.items():
        names = key.split()
        for name in names:
            if name not in signature.field_names:
                known = [*keys, *signature.field_names]
                raise tree.fail_at_key(f"unknown name '{name}'\n  {suggest(name, known)}")
            if name in written:
                raise tree.fail_at_key(f"'{name}' is written twice\n  next: remove one")
            written.add(name)
        axes[key] = _choices(names, tree, signature)
    return axes


def _choices(names: list[str], tree: Tree, signature: Signature) -> list[Values]:
    found: dict[tuple[str, ...], Values] = {}
    for item in _items(tree):
        values = _items(item) if len(names) > 1 else [item]
        if len(values) != len(names):
            raise item.fail(f"{len(values)} values for '{' '.join(names)}'\n  "
                            f"next: write {len(names)}, as in `{' '.join(names)}: [[.., ..]]`")
        chosen = {
            name: _value(name, value, signature)
            for name, value in zip(names, values, strict=True)
        }
        key = tuple(chosen.values())
        if key in found:
            text = ", ".join(key)
            raise item.fail(f"'{text}' is listed twice for '{' '.join(names)}'\n  next: remove one")
        found[key] = chosen
    return list(found.values())


def _value(name: str, tree: Tree, signature: Signature) -> str:
    text = tree.text()
    for dim in signature.dims:
        if dim.name == name:
            extent = read_extent(text)
            if extent is None or extent < dim.smallest:
                raise tree.fail(f"{name}={text[:40]} is not a whole number >= {dim.smallest}"
                                f" of at most {MOST_DIGITS} digits")
            return text
    field = next(f for f in signature.choices if f.name == name)
    allowed = {chosen[name] for chosen in signature.dtype_combinations()} | set(field.allowed)
    if text not in allowed:
        raise tree.fail(f"'{text}' is no value of '{name}'\n  {suggest(text, allowed)}")
    return text


def _refuse_repeats(
    own: Mapping[str, object], axes: Mapping[str, object], model: _ModelEntry
) -> None:
    for name in chain(*(key.split() for key in own)):
        if any(name in key.split() for key in axes):
            raise model.tree.fail(
                f"'{name}' of model '{model.model.name}' is also given by the call\n"
                "  next: remove it from the model or from the call"
            )


def _problem(values: Values, signature: Signature, call: Tree) -> Problem:
    for dim in signature.dims:
        if dim.like and dim.like in values:
            values.setdefault(dim.name, values[dim.like])
    try:
        return parse_problem(",".join(f"{n}={v}" for n, v in values.items()), signature)
    except ProblemError as problem:
        raise call.fail(str(problem)) from None


def _items(tree: Tree) -> list[Tree]:
    """The items of a non-empty list; a single value stands for a list of one."""
    if tree.is_scalar:
        return [tree]
    items = tree.sequence()
    if not items:
        raise tree.fail("the list is empty\n  next: add a value, or remove the entry")
    return items
