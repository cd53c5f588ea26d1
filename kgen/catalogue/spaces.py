"""Search spaces from `search_spaces/<operator>.yaml`, checked against the operator's signature.

A file may belong to a family (`search_spaces/families/<family>.yaml`): its entries are then merged
over the family's. docs/search-spaces.md describes the language.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kgen.catalogue.bodies import VARIANT_KEYS, Body, Groups, body_of
from kgen.catalogue.lets import value_of
from kgen.catalogue.variants import PassReader, config_reader
from kgen.catalogue.yaml_tree import Tree, read_yaml
from kgen.errors import suggest
from kgen.model.config import Value
from kgen.model.gpu import GPU_EXPR_NAMES
from kgen.model.signature import Signature
from kgen.model.space import LadderStep, Space, Variant

FAMILIES = "families"  # folder of the families' files, beside the operators' files
_PASS_KEYS = ("let",)  # keys of a pass besides its variants


def load_space(
    path: Path,
    operator: str,
    signature: Signature,
    shown_as: str = "",
    templates: Path | None = None,
) -> Space:
    """Read and check a search space.

    Args:
        path: The file.
        operator: The operator's name.
        signature: Its signature.
        shown_as: Name of the file in messages and reports; default: the path.
        templates: Folder of the template folders. If it is None, launches must list their
            arguments.

    Raises:
        SpaceError: With `file:line` of the first mistake.
        CatalogueError: If a template is missing.
    """
    own = _read_file(read_yaml(path, shown_as=shown_as), operator)
    files = [own]
    if own.family:
        family_file = path.parent / FAMILIES / f"{own.family}.yaml"
        if not family_file.is_file():
            known = [file.stem for file in sorted(family_file.parent.glob("*.yaml"))]
            raise own.entries["family"].fail(
                f"there is no family '{own.family}'\n  expected: {family_file}\n"
                f"  {suggest(own.family, known)}"
            )
        folder = shown_as.rpartition("/")[0]
        shown = f"{folder}/{FAMILIES}/{family_file.name}" if shown_as else ""
        files.insert(0, _read_family(read_yaml(family_file, shown_as=shown), own.family))
    reader = _SpaceReader(operator, signature, files, templates, bool(shown_as))
    variants = reader.variants()
    reader.check_all_used()
    steps = next((file.ladder for file in reversed(files) if file.ladder is not None), [])
    return Space(operator, own.tree.path, variants, _ladder(steps, variants), own.family)


@dataclass(frozen=True, slots=True)
class _File:
    """The top level of an operator's file, or of a family's."""

    tree: Tree
    entries: Mapping[str, Tree]
    family: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)

    def mapping(self, key: str) -> dict[str, Tree]:
        """An entry that may be left out."""
        return self.entries[key].mapping() if key in self.entries else {}

    @property
    def ladder(self) -> list[Tree] | None:
        """The entries of `ladder`; None if the file has no such key."""
        return self.entries["ladder"].sequence() if "ladder" in self.entries else None


def _read_file(tree: Tree, operator: str) -> _File:
    entries = tree.fields(
        required=["operator"], optional=["family", "set", "let", "groups", "passes", "ladder"]
    )
    named = entries["operator"].text()
    if named != operator:
        raise entries["operator"].fail(f"'{named}' does not match the file's name '{operator}'")
    if "family" not in entries:
        tree.fields(required=["operator", "passes"], optional=["let", "groups", "ladder"])
        return _File(tree, entries)
    settings = {}
    for name, value in (entries["set"].mapping() if "set" in entries else {}).items():
        if not name.isidentifier() or name in GPU_EXPR_NAMES:
            raise value.fail_at_key(f"'{name}' cannot name a setting: no identifier, or taken")
        settings[name] = value_of(value)
    return _File(tree, entries, entries["family"].text(), settings)


def _read_family(tree: Tree, family: str) -> _File:
    entries = tree.fields(required=["family", "passes"], optional=["let", "groups", "ladder"])
    named = entries["family"].text()
    if named != family:
        raise entries["family"].fail(f"'{named}' does not match the file's name '{family}'")
    return _File(tree, entries)


class _SpaceReader:
    """Reads the variants of an operator's file, merged over its family's if it has one."""

    def __init__(
        self,
        operator: str,
        signature: Signature,
        files: Sequence[_File],
        templates: Path | None,
        builtin: bool,
    ) -> None:
        self._signature = signature
        self._files = files
        own = files[-1]
        folder = own.family or operator
        self._templates = templates / folder if templates is not None else None
        self._shown = f"templates/{folder}" if builtin else ""
        self._settings = own.settings
        self._lets: dict[str, Tree] = {}
        trees: dict[str, Tree] = {}
        for file in files:
            self._lets |= file.mapping("let")
            trees |= file.mapping("groups")
        self._groups = Groups(trees)
        self._used: set[tuple[str, int]] = set()  # places of the lets that an expression used

    def variants(self) -> tuple[Variant, ...]:
        """Read all variants, pass after pass.

        Raises:
            SpaceError: With `file:line` of the first mistake.
        """
        known = {p.name: p for p in self._signature.passes}
        passes: dict[str, list[Tree]] = {}
        for file in self._files:
            for name, tree in file.mapping("passes").items():
                if name not in known:
                    raise tree.fail_at_key(f"unknown pass '{name}'\n  {suggest(name, known)}")
                passes.setdefault(name, []).append(tree)
        variants: list[Variant] = []
        for name, trees in passes.items():
            reader = PassReader(
                self._signature, known[name], self._settings, self._templates, self._shown
            )
            found = self._of_pass(reader, trees)
            safe = [v for v in found if v.safe is not None]
            if len(safe) != 1:
                raise trees[-1].fail(
                    f"exactly one variant of '{name}' must declare 'safe' (the "
                    f"config that is correct for every problem); found {len(safe)}"
                )
            variants += found
        return tuple(variants)

    def _of_pass(self, reader: PassReader, trees: Sequence[Tree]) -> list[Variant]:
        lets = dict(self._lets)
        bodies: dict[str, Body] = {}
        for tree in trees:
            entries = tree.mapping()
            if "let" in entries:
                lets |= entries["let"].mapping()
            for name, variant in entries.items():
                if name in _PASS_KEYS:
                    continue
                body = body_of(variant, VARIANT_KEYS, shared=False)
                body = self._groups.with_used(body, variant.mapping().get("use"))
                bodies[name] = body.on(bodies[name]) if name in bodies else body
        return [reader.variant(name, body, lets, self._used) for name, body in bodies.items()]

    def check_all_used(self) -> None:
        """Refuse unused groups and lets of the operator's own file.

        Groups and lets of a family are not checked: another member may use them.

        Raises:
            SpaceError: The text names the first unused group or let.
        """
        own = self._files[-1]
        for name, group in own.mapping("groups").items():
            if name not in self._groups.used:
                raise group.fail_at_key(f"group '{name}' is used by no variant\n  next: remove it")
        for name, let in _all_lets(own):
            if let.place not in self._used:
                raise let.fail_at_key(f"let '{name}' is used by no variant\n  next: remove it")


def _all_lets(file: _File) -> Iterable[tuple[str, Tree]]:
    """Yield the lets of all levels of a file."""
    yield from file.mapping("let").items()
    for group in file.mapping("groups").values():
        yield from _lets_in(group)
    for pass_ in file.mapping("passes").values():
        yield from _lets_in(pass_)
        for name, variant in pass_.mapping().items():
            if name not in _PASS_KEYS:
                yield from _lets_in(variant)


def _lets_in(tree: Tree) -> Iterable[tuple[str, Tree]]:
    entries = tree.mapping()
    if "let" in entries:
        yield from entries["let"].mapping().items()


def _is_own(step: Mapping[str, Tree]) -> bool:
    """Whether a step of a ladder is kgen's own, beyond the published steps."""
    if "own" not in step:
        return False
    if step["own"].scalar() is not True:
        raise step["own"].fail("expected 'own: true', of a step that was not published")
    if "published" in step:
        raise step["own"].fail("a step of kgen's own has no published figure")
    return True


def _ladder(items: Sequence[Tree], variants: Sequence[Variant]) -> tuple[LadderStep, ...]:
    """Read the published steps; each must be a point of a declared variant."""
    steps: list[LadderStep] = []
    passes = list(dict.fromkeys(v.pass_name for v in variants))
    for item in items:
        entries = item.fields(
            required=["step", "pass", "variant", "config"], optional=["published", "note", "own"]
        )
        texts = {
            key: " ".join(entries[key].text().split()) if key in entries else ""
            for key in ("step", "pass", "variant", "published", "note")
        }
        if texts["pass"] not in passes:
            hint = suggest(texts["pass"], passes)
            raise entries["pass"].fail(f"unknown pass '{texts['pass']}'\n  {hint}")
        known = {v.name: v for v in variants if v.pass_name == texts["pass"]}
        if texts["variant"] not in known:
            raise entries["variant"].fail(
                f"{texts['pass']} has no variant '{texts['variant']}'\n  "
                f"{suggest(texts['variant'], known)}"
            )
        if not texts["step"]:
            raise entries["step"].fail("a step needs the name that it was published by")
        if any((s.pass_name, s.name) == (texts["pass"], texts["step"]) for s in steps):
            raise entries["step"].fail(f"{texts['pass']} has a step '{texts['step']}' already")
        variant = known[texts["variant"]]
        config = config_reader(variant.name, variant.params)(entries["config"])
        steps.append(
            LadderStep(
                name=texts["step"],
                pass_name=texts["pass"],
                config=config,
                published=texts["published"],
                note=texts["note"],
                is_published=not _is_own(entries),
                where=item.where,
            )
        )
    return tuple(steps)
