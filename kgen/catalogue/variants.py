"""Build variants from their entries; check them against the operator's signature and template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kgen.catalogue.bodies import Alignment, Body, RuleText
from kgen.catalogue.launch_reader import LaunchReader, PassNames
from kgen.catalogue.lets import Scope, value_of
from kgen.catalogue.yaml_tree import Tree
from kgen.errors import suggest
from kgen.model.config import Config, Value
from kgen.model.dtypes import DTYPES
from kgen.model.expr import Expr, parse_expr
from kgen.model.gpu import GPU_EXPR_NAMES
from kgen.model.signature import Pass, Signature, Tensor
from kgen.model.space import Param, Rule, Variant, WorkspaceSpec
from kgen.runtime.spelling import spell


class PassReader:
    """Reads the variants of one pass, and checks which names may be used where."""

    def __init__(
        self,
        signature: Signature,
        pass_: Pass,
        settings: Mapping[str, Value],
        templates: Path | None,
        shown_as: str = "",
    ) -> None:
        self.pass_name = pass_.name
        self.names = PassNames.of(signature, pass_)
        self.settings = settings
        self.launches = LaunchReader(pass_.name, self.names, settings, templates, shown_as)

    def variant(
        self, name: str, body: Body, outer: Mapping[str, Tree], used: set[tuple[str, int]]
    ) -> Variant:
        """Build a variant.

        Args:
            name: Name of the variant.
            body: Entries of the variant, merged with those of the groups that it uses.
            outer: Lets of the variant's operator and pass.
            used: Receives the places of the lets that the variant uses.

        Raises:
            SpaceError: With `file:line` of the first mistake.
            CatalogueError: If the variant's template is missing.
        """
        for key in ("doc", "launch", "params"):
            if key not in body.single and not (body.plan if key == "launch" else body.params):
                raise body.tree.fail(f"'{key}' is missing\n  required: doc, params, launch")
        lets = {**outer, **body.lets}
        params = self._params(body.params, lets)
        static = [*self.names.of_problem, *(p.name for p in params), *GPU_EXPR_NAMES]
        at_call = [*static, *self.names.strides, *(f"{t}_ptr" for t in self.names.tensors)]
        scope = Scope(lets, self.settings, static, at_call)
        workspaces = self._workspaces(body.workspaces, scope)
        taken = [*at_call, *self.names.tensors, *self.names.scalars, *body.workspaces]
        self._check_lets(lets, taken)
        constants = self._constants(body.single.get("constants"))
        config = config_reader(name, params)
        safe = config(body.single["safe"]) if "safe" in body.single else None
        guards = (
            *(self._aligned(tensor, given, scope) for tensor, given in body.alignments.items()),
            *(_rule(rule, scope, at_call=True) for rule in body.guards),
        )
        if safe is not None and (constants or guards):
            raise body.single["safe"].fail(
                "a variant with 'safe' must be correct for every problem and call, so it can have "
                "neither 'constants' nor 'guard' or 'aligned'"
            )
        launches = self.launches.read(
            name, body, scope, [w.name for w in workspaces], [p.name for p in params]
        )
        if safe is not None and any(launch.pdl for launch in launches):
            raise body.single["safe"].fail(
                "a variant with 'safe' must run on every GPU, so no launch of it can have 'pdl'\n"
                "  next: take it out of its launches"
            )
        requires = tuple(_rule(rule, scope) for rule in body.rules)
        first = body.single["first"].sequence() if "first" in body.single else []
        steady = self._steady(body.single.get("steady"), scope)
        used |= scope.used_places
        return Variant(
            name=name,
            pass_name=self.pass_name,
            doc=_sentence(body.single["doc"]),
            params=params,
            constants=constants,
            requires=requires,
            guards=guards,
            launches=launches,
            workspaces=workspaces,
            first=tuple(config(tree) for tree in first),
            safe=safe,
            where=body.tree.where,
            nondeterministic=_reason(
                body.single.get("nondeterministic"), "launches on the same inputs may differ"
            ),
            keeps_state=_reason(
                body.single.get("keeps_state"), "kernels may keep something between launches"
            ),
            untested=_untested(body.single.get("untested")),
            steady=steady,
            lets=scope.lets,
            settings=tuple(self.settings.items()),
        )

    def _steady(self, tree: Tree | None, scope: Scope) -> tuple[tuple[str, Expr], ...]:
        """Read `steady: {T: stages * chunk}`: the extents that a proof must reach."""
        extents = tree.mapping() if tree is not None else {}
        for name, extent in extents.items():
            if name not in self.names.dims:
                raise extent.fail_at_key(f"'{name}' is no dim\n  {suggest(name, self.names.dims)}")
        return tuple((name, scope.expr(extent)) for name, extent in extents.items())

    def _params(self, trees: Mapping[str, Tree], lets: Mapping[str, Tree]) -> tuple[Param, ...]:
        params = []
        taken = {*self.names.of_problem, *GPU_EXPR_NAMES, *self.settings}
        for name, tree in trees.items():
            if not name.isidentifier() or name in taken:
                raise tree.fail(
                    f"'{name}' cannot name a parameter: it is no identifier, "
                    "or already means something else in rules"
                )
            if name in lets:
                raise tree.fail(f"'{name}' is a let, too: {lets[name].where}")
            choices_tree, default_tree = _choices(tree)
            choices = tuple(value_of(item) for item in choices_tree.sequence())
            if not choices:
                raise choices_tree.fail(f"'{name}' has no choices")
            if len({spell(c) for c in choices}) != len(choices):
                raise choices_tree.fail(f"'{name}' has a choice twice")
            default = None if default_tree is None else _choice(name, choices, default_tree)
            params.append(Param(name, choices, default))
        return tuple(params)

    def _check_lets(self, lets: Mapping[str, Tree], taken: Sequence[str]) -> None:
        for name, tree in lets.items():
            if name in taken:
                raise tree.fail_at_key(f"'{name}' already means something else in expressions")

    def _constants(self, tree: Tree | None) -> tuple[str, ...]:
        items = tree.sequence() if tree is not None else []
        for item in items:
            if item.text() not in self.names.dims:
                hint = suggest(item.text(), self.names.dims)
                raise item.fail(f"'{item.text()}' is no dim\n  {hint}")
        return tuple(item.text() for item in items)

    def _workspaces(self, trees: Mapping[str, Tree], scope: Scope) -> tuple[WorkspaceSpec, ...]:
        found = []
        for name, tree in trees.items():
            entries = tree.mapping()
            dtype = entries["dtype"].text()
            stored = [known for known, d in DTYPES.items() if not d.rounds]
            if dtype not in stored:
                raise entries["dtype"].fail(f"unknown dtype '{dtype}'\n  {suggest(dtype, stored)}")
            if name in (*self.names.tensors, *self.names.dims, *self.names.scalars):
                raise entries["name"].fail(f"'{name}' already names an argument")
            found.append(WorkspaceSpec(name, dtype, scope.expr(entries["elements"])))
        return tuple(found)

    def _aligned(self, name: str, given: Alignment, scope: Scope) -> Rule:
        """The guard that checks an alignment at a call."""
        if name not in self.names.tensors:
            hint = suggest(name, self.names.tensors)
            raise given.tree.fail_at_key(f"'{name}' is no tensor of this pass\n  {hint}")
        tensor = self.names.tensors[name]
        least = scope.expr(given.tree).text
        itemsize = self._itemsize(tensor)
        if given.in_elements:
            parts = [f"{name}_ptr % (({least}) * {itemsize}) == 0"]
            parts += [f"{name}_stride_{dim} % ({least}) == 0" for dim in tensor.free_strides]
            why = f"vectors of {name} start at multiples of their size"
        else:
            parts = [f"{name}_ptr % ({least}) == 0"]
            parts += [
                f"min({dim} - 1, 1) * {name}_stride_{dim} * {itemsize} % ({least}) == 0"
                for dim in tensor.free_strides
            ]
            why = f"copies of {name} start at multiples of their size, in every row"
        return Rule(parse_expr(" and ".join(parts)), why, given.tree.where)

    def _itemsize(self, tensor: Tensor) -> str:
        return self.names.itemsizes.get(tensor.dtype) or str(DTYPES[tensor.dtype].itemsize)

def config_reader(variant: str, params: Sequence[Param]) -> Callable[[Tree], Config]:
    """Return a function that reads configs of a variant."""

    def read(tree: Tree) -> Config:
        entries = tree.fields(
            required=[p.name for p in params if p.default is None],
            optional=[p.name for p in params if p.default is not None],
        )
        said = [p for p in params if p.name in entries]
        values = {p.name: _choice(p.name, p.choices, entries[p.name]) for p in said}
        return Config.of(
            variant, {p.name: values[p.name] for p in said if not p.is_default(values[p.name])}
        )

    return read


def _choices(tree: Tree) -> tuple[Tree, Tree | None]:
    """Read `[a, b]` or `{choices: [a, b], default: a}`; a list gives None as the default's tree."""
    if not tree.is_mapping:
        return tree, None
    entries = tree.fields(required=["choices", "default"])
    return entries["choices"], entries["default"]


def _choice(name: str, choices: Sequence[Value], tree: Tree) -> Value:
    value = value_of(tree)
    for choice in choices:
        if spell(choice) == spell(value):
            return choice
    raise tree.fail(
        f"{name}={spell(value)} is not among its choices\n"
        f"  allowed: {', '.join(spell(c) for c in choices)}"
    )


def _rule(rule: RuleText, scope: Scope, *, at_call: bool = False) -> Rule:
    entries = rule.tree.mapping()
    why = _sentence(entries["why"])
    if not why:
        raise entries["why"].fail("a rule must say why it holds")
    condition = scope.expr(entries["rule"], at_call=at_call)
    return Rule(condition, why, entries["rule"].where, rule.kind)


def _reason(tree: Tree | None, what: str) -> str:
    if tree is None:
        return ""
    if not (why := _sentence(tree)):
        raise tree.fail(f"say why {what}, or leave the key out")
    return why


def _untested(tree: Tree | None) -> tuple[tuple[str, str], ...]:
    """Read `untested: {"row < M": why no certificate shows its opposite}`."""
    conditions = tree.mapping() if tree is not None else {}
    return tuple(
        (condition, _reason(why, f"nothing need test what depends on `{condition}`"))
        for condition, why in conditions.items()
    )


def _sentence(tree: Tree) -> str:
    return " ".join(tree.text().split())
