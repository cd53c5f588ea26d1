"""Variants from their entries, checked against the operator's signature and their template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kgen.catalogue.bodies import Alignment, Body, LaunchText, RuleText
from kgen.catalogue.kernels import FLOAT, INT64, KIND_TEXT, POINTER, Kernel, kernels_of
from kgen.catalogue.lets import Scope, value_of
from kgen.catalogue.yaml_tree import Tree
from kgen.errors import CatalogueError, suggest
from kgen.model.config import Config, Value
from kgen.model.dtypes import DTYPES
from kgen.model.expr import Expr, base_names, inlined, parse_expr
from kgen.model.gpu import GPU_EXPR_NAMES
from kgen.model.signature import Pass, Signature, Tensor
from kgen.model.space import LaunchSpec, Param, Rule, Variant, WorkspaceSpec
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
        self.dims = [d.name for d in signature.dims]
        self.tensors = {t.name: t for t in pass_.tensors}
        self.scalars = [s.name for s in pass_.scalars]
        self.strides = [f"{t.name}_stride_{d}" for t in pass_.tensors for d in t.free_strides]
        self.itemsizes = {f.name: f.itemsize_name for f in signature.dtypes}
        self.problem_names = [
            *self.dims,
            *(f.name for f in signature.choices),
            *self.itemsizes.values(),
        ]
        self.settings = settings
        self.templates = templates
        self.shown_as = shown_as

    def variant(
        self, name: str, body: Body, outer: Mapping[str, Tree], used: set[tuple[str, int]]
    ) -> Variant:
        """Build a variant.

        Args:
            name: Its name.
            body: Its entries, with those of the groups that it uses.
            outer: Lets of its operator and pass.
            used: Receives the places of the used lets.

        Raises:
            SpaceError: With `file:line` of the first mistake.
            CatalogueError: If its template is missing.
        """
        for key in ("doc", "launch", "params"):
            if key not in body.single and not (body.plan if key == "launch" else body.params):
                raise body.tree.fail(f"'{key}' is missing\n  required: doc, params, launch")
        lets = {**outer, **body.lets}
        params = self._params(body.params, lets)
        static = [*self.problem_names, *(p.name for p in params), *GPU_EXPR_NAMES]
        at_call = [*static, *self.strides, *(f"{t}_ptr" for t in self.tensors)]
        scope = Scope(lets, self.settings, static, at_call)
        workspaces = self._workspaces(body.workspaces, scope)
        self._check_lets(lets, [*at_call, *self.tensors, *self.scalars, *body.workspaces])
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
        launches = self._launches(name, body, scope, [w.name for w in workspaces], params)
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
            steady=steady,
            lets=scope.lets,
            settings=tuple(self.settings.items()),
        )

    def _steady(self, tree: Tree | None, scope: Scope) -> tuple[tuple[str, Expr], ...]:
        """Read `steady: {T: stages * chunk}`: how far a proof must go."""
        extents = tree.mapping() if tree is not None else {}
        for name, extent in extents.items():
            if name not in self.dims:
                raise extent.fail_at_key(f"'{name}' is no dim\n  {suggest(name, self.dims)}")
        return tuple((name, scope.expr(extent)) for name, extent in extents.items())

    def _params(self, trees: Mapping[str, Tree], lets: Mapping[str, Tree]) -> tuple[Param, ...]:
        params = []
        taken = {*self.problem_names, *GPU_EXPR_NAMES, *self.settings}
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
            if item.text() not in self.dims:
                raise item.fail(f"'{item.text()}' is no dim\n  {suggest(item.text(), self.dims)}")
        return tuple(item.text() for item in items)

    def _workspaces(self, trees: Mapping[str, Tree], scope: Scope) -> tuple[WorkspaceSpec, ...]:
        found = []
        for name, tree in trees.items():
            entries = tree.mapping()
            dtype = entries["dtype"].text()
            stored = [known for known, d in DTYPES.items() if not d.rounds]
            if dtype not in stored:
                raise entries["dtype"].fail(f"unknown dtype '{dtype}'\n  {suggest(dtype, stored)}")
            if name in (*self.tensors, *self.dims, *self.scalars):
                raise entries["name"].fail(f"'{name}' already names an argument")
            found.append(WorkspaceSpec(name, dtype, scope.expr(entries["elements"])))
        return tuple(found)

    def _aligned(self, name: str, given: Alignment, scope: Scope) -> Rule:
        """The guard of an alignment."""
        if name not in self.tensors:
            hint = suggest(name, self.tensors)
            raise given.tree.fail_at_key(f"'{name}' is no tensor of this pass\n  {hint}")
        tensor = self.tensors[name]
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
        return self.itemsizes.get(tensor.dtype) or str(DTYPES[tensor.dtype].itemsize)

    def _launches(
        self,
        name: str,
        body: Body,
        scope: Scope,
        workspaces: Sequence[str],
        params: Sequence[Param],
    ) -> tuple[LaunchSpec, ...]:
        kernels: Mapping[str, Kernel] | None = None
        file = f"{self.pass_name}_{name}.cu.jinja"
        if self.templates is not None:
            path = self.templates / file
            if not path.is_file():
                raise CatalogueError(
                    f"{body.tree.where}: variant '{name}' has no template\n  expected: {path}"
                )
            kernels = kernels_of(path, self.settings, self.shown_as and f"{self.shown_as}/{file}")
        launches = tuple(
            self._launch(launch, scope, workspaces, [p.name for p in params], kernels)
            for launch in body.plan
        )
        for kernel in (kernels or {}).values():
            if kernel.name not in [launch.kernel for launch in launches]:
                raise body.tree.fail(
                    f"variant '{name}' does not launch kernel '{kernel.name}' of its template\n"
                    f"  declared at {kernel.where}; launch it, or take it out"
                )
        return launches

    def _launch(
        self,
        launch: LaunchText,
        scope: Scope,
        workspaces: Sequence[str],
        params: Sequence[str],
        kernels: Mapping[str, Kernel] | None,
    ) -> LaunchSpec:
        kernel, entries = launch.kernel.text(), launch.entries
        for key in ("grid", "block"):
            if key not in entries:
                raise launch.kernel.fail(
                    f"launch '{kernel}' has no '{key}'\n  required: kernel, grid, block"
                )
        declared = None
        if kernels is not None:
            if kernel not in kernels:
                raise launch.kernel.fail(
                    f"the template has no kernel '{kernel}'\n  {suggest(kernel, kernels)}"
                )
            declared = kernels[kernel]
        return LaunchSpec(
            kernel=kernel,
            grid=_extents(entries["grid"], scope),
            block=_extents(entries["block"], scope),
            smem=scope.expr(entries["smem"]) if "smem" in entries else parse_expr(0),
            args=self._args(launch, scope, workspaces, params, declared),
            pdl=_of_params(entries.get("pdl"), params, scope, kernel),
            coresident=declared is not None and declared.has_grid_barriers,
        )

    def _args(
        self,
        launch: LaunchText,
        scope: Scope,
        workspaces: Sequence[str],
        params: Sequence[str],
        kernel: Kernel | None,
    ) -> tuple[str | Expr, ...]:
        given = launch.entries.get("args")
        pointers = [*self.tensors, *workspaces]
        kinds = dict.fromkeys(pointers, POINTER) | dict.fromkeys(self.scalars, FLOAT)
        kinds |= dict.fromkeys([*self.dims, *self.strides], INT64)
        if given is not None and not given.is_mapping:
            return self._listed(given.sequence(), scope, [*kinds])
        if kernel is None:
            raise launch.kernel.fail("'args' is missing, and there is no template to read it from")
        own = given.mapping() if given is not None else {}
        for name, tree in own.items():
            if name not in (names := [p.name for p in kernel.params]):
                raise tree.fail_at_key(
                    f"kernel '{kernel.name}' has no parameter '{name}'\n  {suggest(name, names)}"
                )
        numbers = [*scope.let_names, *params, *self.itemsizes.values()]
        args: list[str | Expr] = []
        unknown: list[str] = []
        for param in kernel.params:
            if param.name in own:
                bound = scope.expr(own[param.name], allow=kinds)
            elif param.name in kinds:
                bound = parse_expr(param.name)
            elif param.name in numbers:
                bound = scope.named(param.name, launch.kernel)
            else:
                unknown.append(param.name)
                continue
            whole = inlined(bound, dict(scope.lets)).text
            kind = kinds.get(whole, INT64)
            if kind != param.kind:
                raise launch.kernel.fail(
                    f"parameter '{param.name}' of kernel '{kernel.name}' ({kernel.where}) is "
                    f"{KIND_TEXT[param.kind]}, but '{whole}' is {KIND_TEXT[kind]}"
                )
            args.append(whole if whole in kinds else bound)
        if unknown:
            allowed = ", ".join([*kinds, *numbers])
            raise launch.kernel.fail(
                f"kernel '{kernel.name}' has parameters that mean nothing here: "
                f"{', '.join(unknown)}\n"
                f"  {suggest(unknown[0], [*kinds, *numbers]).partition('known:')[0].strip()}\n"
                f"  its parameters ({kernel.where}): {', '.join(p.name for p in kernel.params)}\n"
                f"  allowed: {allowed}\n"
                f"  next: rename one, say `args: {{{unknown[0]}: ...}}`, or define a let"
                .replace("\n  \n", "\n")
            )
        return tuple(args)

    def _listed(
        self, items: Sequence[Tree], scope: Scope, allowed: Sequence[str]
    ) -> tuple[str | Expr, ...]:
        """`args` as a list: all of them, in the kernel's order."""
        known = [*allowed, *self.itemsizes.values(), *scope.let_names]
        for arg in items:
            if arg.text().isidentifier() and arg.text() not in known:
                raise arg.fail(
                    f"unknown kernel argument '{arg.text()}'\n  {suggest(arg.text(), known)}"
                )
        return tuple(a.text() if a.text() in allowed else scope.expr(a) for a in items)


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
    """Read `[a, b]`, or `{choices: [a, b], default: a}`; the default's tree is None for a list."""
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


def _of_params(
    tree: Tree | None, params: Sequence[str], scope: Scope, kernel: str
) -> Expr | None:
    """Read `pdl`: a condition over parameters only, so that it is known when code is emitted."""
    if tree is None:
        return None
    expr = scope.expr(tree, only=params, what=f"launch '{kernel}' has 'pdl: {tree.text()}', but")
    names = base_names(expr, dict(scope.lets))
    if not names:
        raise tree.fail(
            f"launch '{kernel}' has 'pdl: {expr.text}', which is the same for every config\n"
            f"  allowed: a condition over {', '.join(params)}"
        )
    return expr


def _extents(tree: Tree, scope: Scope) -> tuple[Expr, ...]:
    """Read `ceil_div(M, rows)`, or `[ceil_div(M, rows), 2]`.

    To YAML the comma inside a call in a list ends an item.
    """
    if tree.is_scalar:
        return (scope.expr(tree),)
    texts: list[str] = []
    for item in tree.sequence():
        if texts and texts[-1].count("(") > texts[-1].count(")"):
            texts[-1] += ", " + item.text()
        else:
            texts.append(item.text())
    if not 1 <= len(texts) <= 3:
        raise tree.fail(f"one to three extents are expected here, not {len(texts)}")
    return tuple(scope.parsed(text, tree) for text in texts)


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


def _sentence(tree: Tree) -> str:
    return " ".join(tree.text().split())
