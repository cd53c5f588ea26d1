"""The launches of a variant: grid, block, shared memory and arguments of each kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kgen.catalogue.bodies import Body, LaunchText
from kgen.catalogue.kernels import FLOAT, INT64, KIND_TEXT, POINTER, Kernel, kernels_of
from kgen.catalogue.lets import Scope
from kgen.catalogue.yaml_tree import Tree
from kgen.errors import CatalogueError, suggest
from kgen.model.config import Value
from kgen.model.expr import Expr, base_names, inlined, parse_expr
from kgen.model.signature import Pass, Signature, Tensor
from kgen.model.space import LaunchSpec


@dataclass(frozen=True, slots=True)
class PassNames:
    """The names that expressions and kernels of a pass may use.

    Attributes:
        dims: The operator's dims.
        tensors: The pass's tensors by name.
        scalars: The pass's scalars.
        strides: `<tensor>_stride_<dim>` of each stride that a caller chooses.
        itemsizes: By dtype field, the name of the size of its element.
        of_problem: Names that a problem gives values to: dims, fields and element sizes.
    """

    dims: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    scalars: tuple[str, ...]
    strides: tuple[str, ...]
    itemsizes: Mapping[str, str]
    of_problem: tuple[str, ...]

    @classmethod
    def of(cls, signature: Signature, pass_: Pass) -> PassNames:
        """Return the names of one pass of an operator."""
        dims = tuple(d.name for d in signature.dims)
        itemsizes = {f.name: f.itemsize_name for f in signature.dtypes}
        return cls(
            dims=dims,
            tensors={t.name: t for t in pass_.tensors},
            scalars=tuple(s.name for s in pass_.scalars),
            strides=tuple(f"{t.name}_stride_{d}" for t in pass_.tensors for d in t.free_strides),
            itemsizes=itemsizes,
            of_problem=(*dims, *(f.name for f in signature.choices), *itemsizes.values()),
        )


@dataclass(frozen=True, slots=True)
class LaunchReader:
    """Reads launches of one pass, and compares them with the kernels of the templates.

    Attributes:
        pass_name: `forward` or `backward`.
        names: The names that kernels of the pass may take.
        settings: The operator's settings of its family's templates.
        templates: Folder of the templates; None: launches are not compared with kernels.
        shown_as: The folder's name in errors; empty: its path.
    """

    pass_name: str
    names: PassNames
    settings: Mapping[str, Value]
    templates: Path | None
    shown_as: str

    def read(
        self,
        name: str,
        body: Body,
        scope: Scope,
        workspaces: Sequence[str],
        params: Sequence[str],
    ) -> tuple[LaunchSpec, ...]:
        """Read the launches of a variant.

        Args:
            name: Name of the variant.
            body: Entries of the variant.
            scope: The names that expressions may use.
            workspaces: Names of the variant's workspaces.
            params: Names of the variant's parameters.
        Raises:
            SpaceError: With `file:line` of the first mistake.
            CatalogueError: If the variant's template is missing.
        """
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
            self._launch(launch, scope, workspaces, params, kernels)
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
        pointers = [*self.names.tensors, *workspaces]
        kinds = dict.fromkeys(pointers, POINTER) | dict.fromkeys(self.names.scalars, FLOAT)
        kinds |= dict.fromkeys([*self.names.dims, *self.names.strides], INT64)
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
        numbers = [*scope.let_names, *params, *self.names.itemsizes.values()]
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
        """Read `args` given as a list: all arguments, in the kernel's order."""
        known = [*allowed, *self.names.itemsizes.values(), *scope.let_names]
        for arg in items:
            if arg.text().isidentifier() and arg.text() not in known:
                raise arg.fail(
                    f"unknown kernel argument '{arg.text()}'\n  {suggest(arg.text(), known)}"
                )
        return tuple(a.text() if a.text() in allowed else scope.expr(a) for a in items)


def _of_params(
    tree: Tree | None, params: Sequence[str], scope: Scope, kernel: str
) -> Expr | None:
    """Read `pdl`. It may name parameters only, so that its value is known when code is emitted."""
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

    In a YAML list the comma inside a call ends an item, so the items of a call are joined again.
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
