"""Search spaces from `search_spaces/<operator>.yaml`, checked against the operator's signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kgen.catalogue.yaml_tree import Tree, read_yaml
from kgen.errors import ExprError, suggest
from kgen.model.config import Config, Value, spell
from kgen.model.dtypes import DTYPES
from kgen.model.expr import Expr, parse_expr
from kgen.model.gpu import GPU_EXPR_NAMES
from kgen.model.signature import Pass, Signature
from kgen.model.space import (
    LadderStep,
    LaunchSpec,
    Param,
    Rule,
    RuleKind,
    Space,
    Variant,
    WorkspaceSpec,
)


def load_space(path: Path, operator: str, signature: Signature, shown_as: str = "") -> Space:
    """Read and check a search space; `shown_as` names the file in messages and reports.

    Raises:
        SpaceError: With `file:line` of the first mistake.
    """
    tree = read_yaml(path, shown_as=shown_as)
    entries = tree.fields(required=["operator", "passes"], optional=["ladder"])
    named = entries["operator"].text()
    if named != operator:
        raise entries["operator"].fail(f"'{named}' does not match the file's name '{operator}'")
    variants: list[Variant] = []
    known = [p.name for p in signature.passes]
    for pass_name, pass_tree in entries["passes"].mapping().items():
        if pass_name not in known:
            hint = suggest(pass_name, known)
            raise pass_tree.fail_at_key(f"unknown pass '{pass_name}'\n  {hint}")
        reader = _PassReader(signature, signature.pass_named(pass_name))
        found = [reader.variant(n, t) for n, t in pass_tree.mapping().items()]
        safe = [v for v in found if v.safe is not None]
        if len(safe) != 1:
            raise pass_tree.fail(
                f"exactly one variant of '{pass_name}' must declare 'safe' (the "
                f"config that is right for every problem); found {len(safe)}"
            )
        variants += found
    ladder = _ladder(_items(entries.get("ladder")), variants)
    return Space(operator, tree.path, tuple(variants), ladder)


class _PassReader:
    """Reads variants of one pass; knows which names may be used where."""

    def __init__(self, signature: Signature, pass_: Pass) -> None:
        self.pass_name = pass_.name
        self.dims = [d.name for d in signature.dims]
        self.tensors = [t.name for t in pass_.tensors]
        self.scalars = [s.name for s in pass_.scalars]
        self.strides = [f"{t.name}_stride_{d}" for t in pass_.tensors for d in t.free_strides]
        self.itemsizes = [f.itemsize_name for f in signature.dtypes]
        self.problem_names = [
            *self.dims,
            *(f.name for f in signature.choices),
            *self.itemsizes,
        ]

    def variant(self, name: str, tree: Tree) -> Variant:
        entries = tree.fields(
            required=["doc", "params", "launch"],
            optional=[
                "constants",
                "require",
                "guard",
                "workspace",
                "first",
                "safe",
                "nondeterministic",
            ],
        )
        params = self._params(entries["params"])
        static = [*self.problem_names, *(p.name for p in params), *GPU_EXPR_NAMES]
        at_call = [*static, *self.strides, *(f"{t}_ptr" for t in self.tensors)]
        constants = self._constants(entries.get("constants"))
        workspaces = self._workspaces(entries.get("workspace"), static)
        config = _config_reader(name, params)
        safe = config(entries["safe"]) if "safe" in entries else None
        guards = _rules(entries.get("guard"), at_call)
        if safe is not None and (constants or guards):
            raise entries["safe"].fail(
                "a variant with 'safe' must be right for every problem and call, so it can have "
                "neither 'constants' nor 'guard'"
            )
        nondeterministic = ""
        if "nondeterministic" in entries:
            nondeterministic = " ".join(entries["nondeterministic"].text().split())
            if not nondeterministic:
                raise entries["nondeterministic"].fail(
                    "say why launches on the same inputs may differ, or leave the key out"
                )
        launches = tuple(
            self._launch(item, static, [w.name for w in workspaces], [p.name for p in params], i)
            for i, item in enumerate(entries["launch"].sequence())
        )
        if safe is not None and any(x.overlaps or x.early for x in launches):
            raise entries["safe"].fail(
                "a variant with 'safe' must run on every GPU, so no launch of it can have "
                "'overlaps' or 'early'\n  next: take it out of its launches"
            )
        return Variant(
            name=name,
            pass_name=self.pass_name,
            doc=" ".join(entries["doc"].text().split()),
            params=params,
            constants=constants,
            requires=_rules(entries.get("require"), static, kinds=True),
            guards=guards,
            launches=launches,
            workspaces=workspaces,
            first=tuple(config(t) for t in _items(entries.get("first"))),
            safe=safe,
            where=tree.where,
            nondeterministic=nondeterministic,
        )

    def _params(self, tree: Tree) -> tuple[Param, ...]:
        params = []
        for name, choices_tree in tree.mapping().items():
            if not name.isidentifier() or name in self.problem_names or name in GPU_EXPR_NAMES:
                raise choices_tree.fail(
                    f"'{name}' cannot name a parameter: it is no identifier, "
                    "or already means something else in rules"
                )
            choices_tree, default_tree = _choices(choices_tree)
            choices = tuple(_value(item) for item in choices_tree.sequence())
            if not choices:
                raise choices_tree.fail(f"'{name}' has no choices")
            if len({spell(c) for c in choices}) != len(choices):
                raise choices_tree.fail(f"'{name}' has a choice twice")
            default = None if default_tree is None else _choice(name, choices, default_tree)
            params.append(Param(name, choices, default))
        return tuple(params)

    def _constants(self, tree: Tree | None) -> tuple[str, ...]:
        for item in _items(tree):
            if item.text() not in self.dims:
                raise item.fail(f"'{item.text()}' is no dim\n  {suggest(item.text(), self.dims)}")
        return tuple(item.text() for item in _items(tree))

    def _workspaces(self, tree: Tree | None, names: Sequence[str]) -> tuple[WorkspaceSpec, ...]:
        found = []
        for item in _items(tree):
            entries = item.fields(required=["name", "dtype", "elements"])
            dtype = entries["dtype"].text()
            stored = [name for name, d in DTYPES.items() if not d.rounds]
            if dtype not in stored:
                raise entries["dtype"].fail(f"unknown dtype '{dtype}'\n  {suggest(dtype, stored)}")
            name = entries["name"].text()
            if name in (*self.tensors, *self.dims, *self.scalars):
                raise entries["name"].fail(f"'{name}' already names an argument")
            found.append(WorkspaceSpec(name, dtype, _expr(entries["elements"], names)))
        return tuple(found)

    def _launch(
        self,
        tree: Tree,
        names: Sequence[str],
        workspaces: list[str],
        params: list[str],
        index: int,
    ) -> LaunchSpec:
        entries = tree.fields(
            required=["kernel", "grid", "block", "args"], optional=["smem", "overlaps", "early"]
        )
        kernel = entries["kernel"].text()
        if "overlaps" in entries and index == 0:
            raise entries["overlaps"].fail(
                f"launch '{kernel}' is the first of its plan, so it cannot have 'overlaps: "
                f"{entries['overlaps'].text()}': what runs before a plan does not know of it\n"
                "  allowed: in the second launch and later ones; the first can have 'early'"
            )
        if "early" in entries and index > 0:
            raise entries["early"].fail(
                f"launch '{kernel}' is not the first of its plan, so it cannot have 'early: "
                f"{entries['early'].text()}': that is about what runs before a plan\n"
                "  allowed: in the first launch; later ones can have 'overlaps'"
            )
        allowed = [*self.tensors, *workspaces, *self.dims, *self.scalars, *self.strides]
        args = entries["args"].sequence()
        for arg in args:
            if arg.text().isidentifier() and arg.text() not in (*allowed, *self.itemsizes):
                raise arg.fail(
                    f"unknown kernel argument '{arg.text()}'\n  {suggest(arg.text(), allowed)}"
                )
        return LaunchSpec(
            kernel=kernel,
            grid=_extents(entries["grid"], names),
            block=_extents(entries["block"], names),
            smem=_expr(entries["smem"], names) if "smem" in entries else parse_expr(0),
            args=tuple(a.text() if a.text() in allowed else _expr(a, names) for a in args),
            overlaps=_of_params(entries.get("overlaps"), params, f"launch '{kernel}'", "overlaps"),
            early=_of_params(entries.get("early"), params, f"launch '{kernel}'", "is early"),
        )


def _choices(tree: Tree) -> tuple[Tree, Tree | None]:
    """Read `[a, b]`, or `{choices: [a, b], default: a}`; the default's tree is None for a list."""
    if not tree.is_mapping:
        return tree, None
    entries = tree.fields(required=["choices", "default"])
    return entries["choices"], entries["default"]


def _choice(name: str, choices: Sequence[Value], tree: Tree) -> Value:
    value = _value(tree)
    for choice in choices:
        if spell(choice) == spell(value):
            return choice
    raise tree.fail(
        f"{name}={spell(value)} is not among its choices\n"
        f"  allowed: {', '.join(spell(c) for c in choices)}"
    )


def _of_params(tree: Tree | None, params: Sequence[str], launch: str, does: str) -> Expr | None:
    """Read when a launch overlaps what is before it, if it ever does: a condition over parameters.

    Of nothing else, so that the generated library knows it when it is written.
    """
    if tree is None:
        return None
    try:
        expr = parse_expr(tree.text())
    except ExprError as problem:
        raise tree.fail(f"{launch}: {problem}") from None
    where = f"{launch} {does} where '{expr.text}'"
    for name in sorted(expr.names):
        if name not in params:
            raise tree.fail(f"{where}, but '{name}' is no parameter\n  {suggest(name, params)}")
    if not expr.names:
        raise tree.fail(
            f"{where}, which is the same for every config\n"
            f"  allowed: a condition over {', '.join(params)}"
        )
    return expr


def _items(tree: Tree | None) -> list[Tree]:
    return tree.sequence() if tree is not None else []


def _value(tree: Tree) -> Value:
    value = tree.scalar()
    if value is None:
        # YAML 1.1 reads `none` as text but `null` and an empty entry as nothing.
        raise tree.fail("a choice may not be empty or null")
    return value


def _expr(tree: Tree, names: Iterable[str]) -> Expr:
    return _parse(tree.text(), tree, names)


def _parse(text: str, tree: Tree, names: Iterable[str]) -> Expr:
    try:
        expr = parse_expr(text)
    except ExprError as problem:
        raise tree.fail(str(problem)) from None
    known = list(names)
    for name in sorted(expr.names):
        if name not in known:
            raise tree.fail(f"'{expr.text}' uses unknown name '{name}'\n  {suggest(name, known)}")
    return expr


def _extents(tree: Tree, names: Sequence[str]) -> tuple[Expr, ...]:
    """Read `[ceil_div(M, rows), 2]`: to YAML the comma inside the call ends an item."""
    texts: list[str] = []
    for item in tree.sequence():
        if texts and texts[-1].count("(") > texts[-1].count(")"):
            texts[-1] += ", " + item.text()
        else:
            texts.append(item.text())
    if not 1 <= len(texts) <= 3:
        raise tree.fail(f"one to three extents are expected here, not {len(texts)}")
    return tuple(_parse(text, tree, names) for text in texts)


def _rules(tree: Tree | None, names: Sequence[str], *, kinds: bool = False) -> tuple[Rule, ...]:
    """Read rules; only those with `kinds` may say of which kind they are (a guard is legality)."""
    rules = []
    for item in _items(tree):
        entries = item.fields(required=["rule", "why"], optional=["kind"] if kinds else [])
        why = " ".join(entries["why"].text().split())
        if not why:
            raise entries["why"].fail("a rule must say why it holds")
        kind = _kind(entries["kind"]) if "kind" in entries else RuleKind.LEGALITY
        rules.append(Rule(_expr(entries["rule"], names), why, entries["rule"].where, kind))
    return tuple(rules)


def _kind(tree: Tree) -> RuleKind:
    if tree.text() not in list(RuleKind):
        raise tree.fail(f"unknown kind '{tree.text()}'\n  {suggest(tree.text(), list(RuleKind))}")
    return RuleKind(tree.text())


def _ladder(items: Sequence[Tree], variants: Sequence[Variant]) -> tuple[LadderStep, ...]:
    """Read the published steps; each must be a point of a declared variant."""
    steps: list[LadderStep] = []
    passes = list(dict.fromkeys(v.pass_name for v in variants))
    for item in items:
        entries = item.fields(
            required=["step", "pass", "variant", "config"], optional=["published", "note"]
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
        config = _config_reader(variant.name, variant.params)(entries["config"])
        steps.append(
            LadderStep(
                name=texts["step"],
                pass_name=texts["pass"],
                config=config,
                published=texts["published"],
                note=texts["note"],
                where=item.where,
            )
        )
    return tuple(steps)


def _config_reader(variant: str, params: tuple[Param, ...]) -> Callable[[Tree], Config]:
    def read(tree: Tree) -> Config:
        entries = tree.fields(
            required=[p.name for p in params if p.default is None],
            optional=[p.name for p in params if p.default is not None],
        )
        said = [p for p in params if p.name in entries]
        values = {p.name: _choice(p.name, p.choices, entries[p.name]) for p in said}
        return Config.of(variant, {p.name: values[p.name] for p in said
                                   if not p.is_default(values[p.name])})

    return read
