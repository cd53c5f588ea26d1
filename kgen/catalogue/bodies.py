"""The YAML entries of a variant, merged with the groups that it uses.

A variant uses groups, a group may use other groups, and a member of a family adds to the family's
variants. Each of these is a body: a mapping with the same possible keys. A body is merged over the
bodies that it uses or extends: its own entries win.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kgen.catalogue.yaml_tree import Tree
from kgen.errors import suggest
from kgen.model.space import RuleKind

SHARED_KEYS = (
    "use",
    "constants",
    "params",
    "let",
    "require",
    "prefer",
    "guard",
    "aligned",
    "aligned_elements",
    "workspace",
    "launch",
    "nondeterministic",
    "keeps_state",
    "untested",
    "steady",
)
VARIANT_KEYS = ("doc", *SHARED_KEYS, "first", "safe")
_LAUNCH_KEYS = ("kernel", "grid", "block", "smem", "args", "pdl")
_FORMER_PDL_KEYS = frozenset({"overlaps", "early"})
_SINGLE_KEYS = ("doc", "constants", "first", "safe", "nondeterministic", "keeps_state",
                "untested", "steady")


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule as it is written; `name` is empty if no other body can replace the rule."""

    tree: Tree
    kind: RuleKind
    name: str


@dataclass(frozen=True, slots=True)
class Alignment:
    """The alignment that `aligned` or `aligned_elements` requires of a tensor."""

    tree: Tree
    in_elements: bool


@dataclass(frozen=True, slots=True)
class LaunchText:
    """A launch as it is written: its kernel's name, and the other entries."""

    kernel: Tree
    entries: Mapping[str, Tree]


@dataclass(frozen=True, slots=True)
class Body:
    """The entries of a variant, a group, or a part of one.

    Attributes:
        tree: The YAML node that declares it.
        single: Entries that a merge replaces as a whole: doc, constants, first, safe,
            nondeterministic, keeps_state, untested, steady.
        params: Parameters by name.
        lets: Lets by name.
        rules: For each merged body the rules of `require`, then those of `prefer`.
        guards: Rules over pointers and strides.
        alignments: Alignments by tensor.
        workspaces: Workspaces by name.
        known_launches: By kernel: the entries that a launch of the kernel may omit.
        launches: The plan; empty if the plan consists of all known launches.
    """

    tree: Tree
    single: Mapping[str, Tree] = field(default_factory=dict)
    params: Mapping[str, Tree] = field(default_factory=dict)
    lets: Mapping[str, Tree] = field(default_factory=dict)
    rules: Sequence[RuleText] = ()
    guards: Sequence[RuleText] = ()
    alignments: Mapping[str, Alignment] = field(default_factory=dict)
    workspaces: Mapping[str, Tree] = field(default_factory=dict)
    known_launches: Mapping[str, LaunchText] = field(default_factory=dict)
    launches: Sequence[LaunchText] = ()

    @property
    def plan(self) -> Sequence[LaunchText]:
        """The launches in order, each with its omitted entries filled in."""
        if not self.launches:
            return list(self.known_launches.values())
        return [_completed(launch, self.known_launches) for launch in self.launches]

    def on(self, below: Body) -> Body:
        """This body merged over the body `below`; the entries of this body win."""
        return Body(
            tree=self.tree,
            single={**below.single, **self.single},
            params={**below.params, **self.params},
            lets={**below.lets, **self.lets},
            rules=_replaced(below.rules, self.rules),
            guards=_replaced(below.guards, self.guards),
            alignments={**below.alignments, **self.alignments},
            workspaces={**below.workspaces, **self.workspaces},
            known_launches={
                **below.known_launches,
                **{
                    name: _completed(launch, below.known_launches)
                    for name, launch in self.known_launches.items()
                },
            },
            launches=self.launches or below.launches,
        )


def body_of(tree: Tree, keys: Iterable[str], *, shared: bool) -> Body:
    """Read the entries of one body, without those of the groups that it uses.

    Args:
        tree: The body.
        keys: Allowed keys.
        shared: Whether other bodies use the launches of this body.

    Raises:
        SpaceError: If a key is unknown or an entry does not have the documented form.
    """
    entries = tree.fields(required=[], optional=keys)
    alignments: dict[str, Alignment] = {}
    for key in ("aligned", "aligned_elements"):
        for names, value in _mapping(entries, key).items():
            for name in names.split():
                if name in alignments:
                    raise value.fail_at_key(f"the alignment of '{name}' is written twice")
                alignments[name] = Alignment(value, key == "aligned_elements")
    workspaces: dict[str, Tree] = {}
    for item in _items(entries, "workspace"):
        name = item.fields(required=["name", "dtype", "elements"])["name"].text()
        if name in workspaces:
            raise item.fail(f"workspace '{name}' is declared twice")
        workspaces[name] = item
    launches = [_launch(item) for item in _items(entries, "launch")]
    known: dict[str, LaunchText] = {}
    for launch in launches if shared else ():
        if launch.kernel.text() in known:
            raise launch.kernel.fail(f"launch '{launch.kernel.text()}' is declared twice")
        known[launch.kernel.text()] = launch
    return Body(
        tree=tree,
        single={key: entries[key] for key in _SINGLE_KEYS if key in entries},
        params=_mapping(entries, "params"),
        lets=_mapping(entries, "let"),
        rules=[
            *_rules(_items(entries, "require"), RuleKind.LEGALITY),
            *_rules(_items(entries, "prefer"), RuleKind.EFFICIENCY),
        ],
        guards=_rules(_items(entries, "guard"), RuleKind.LEGALITY),
        alignments=alignments,
        workspaces=workspaces,
        known_launches=known,
        launches=[] if shared else launches,
    )


class Groups:
    """The groups of a space, by name."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self._trees = trees
        self._bodies: dict[str, Body] = {}
        self.used: set[str] = set()

    def with_used(self, body: Body, uses: Tree | None, open_: tuple[str, ...] = ()) -> Body:
        """A body merged over the groups that it uses.

        Raises:
            SpaceError: If there is no such group, or a group uses itself.
        """
        below: Body | None = None
        for item in uses.sequence() if uses is not None else []:
            name = item.text()
            if name not in self._trees:
                raise item.fail(f"unknown group '{name}'\n  {suggest(name, self._trees)}")
            if name in open_:
                raise item.fail(f"group '{name}' uses itself: {' -> '.join((*open_, name))}")
            self.used.add(name)
            group = self._group(name, open_)
            below = group if below is None else group.on(below)
        return body if below is None else body.on(below)

    def _group(self, name: str, open_: tuple[str, ...]) -> Body:
        if name not in self._bodies:
            tree = self._trees[name]
            body = body_of(tree, SHARED_KEYS, shared=True)
            uses = tree.mapping().get("use")
            self._bodies[name] = self.with_used(body, uses, (*open_, name))
        return self._bodies[name]


def _launch(tree: Tree) -> LaunchText:
    if not tree.is_mapping:  # `- kernel`: a group has the other entries
        return LaunchText(tree, {})
    for key in _FORMER_PDL_KEYS & set(tree.mapping()):
        raise tree.mapping()[key].fail_at_key(
            f"unknown key '{key}'\n  next: write `pdl:` (programmatic dependent launch) instead"
        )
    entries = tree.fields(required=["kernel"], optional=_LAUNCH_KEYS[1:])
    return LaunchText(entries.pop("kernel"), entries)


def _completed(launch: LaunchText, known: Mapping[str, LaunchText]) -> LaunchText:
    below = known.get(launch.kernel.text())
    if below is None:
        return launch
    return LaunchText(launch.kernel, {**below.entries, **launch.entries})


def _rules(items: Iterable[Tree], kind: RuleKind) -> list[RuleText]:
    rules = []
    for item in items:
        entries = item.fields(required=["rule", "why"], optional=["name"])
        rules.append(RuleText(item, kind, entries["name"].text() if "name" in entries else ""))
    return rules


def _replaced(below: Sequence[RuleText], above: Sequence[RuleText]) -> list[RuleText]:
    """Rules of both bodies; a named rule of `above` replaces the rule of that name in `below`."""
    names = {rule.name: rule for rule in above if rule.name}
    kept = [names.get(rule.name, rule) for rule in below]
    there = {rule.name for rule in below}
    return [*kept, *(rule for rule in above if not rule.name or rule.name not in there)]


def _items(entries: Mapping[str, Tree], key: str) -> list[Tree]:
    return entries[key].sequence() if key in entries else []


def _mapping(entries: Mapping[str, Tree], key: str) -> dict[str, Tree]:
    return entries[key].mapping() if key in entries else {}
