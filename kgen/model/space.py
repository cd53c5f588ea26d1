"""The search space of an operator: variants, parameters, rules, launch plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kgen.errors import SpaceError, suggest
from kgen.model.config import Config, Value
from kgen.model.expr import Expr, inlined
from kgen.runtime.spelling import spell


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter and its choices, in the order in which they are written.

    Attributes:
        name: Name of the parameter.
        choices: Legal values.
        default: The value in a config that omits the parameter; None if every config must name it.
            With a default, a new parameter keeps the identity of earlier kernels and records.
    """

    name: str
    choices: tuple[Value, ...]
    default: Value | None = None

    def is_default(self, value: Value) -> bool:
        """Whether a value is the default, which a config expresses by omitting the parameter."""
        return self.default is not None and spell(value) == spell(self.default)


class RuleKind(StrEnum):
    """The consequence for a config that breaks a rule."""

    LEGALITY = "legality"  # the kernel is wrong, or does not compile or launch
    EFFICIENCY = "efficiency"  # the kernel is correct, but not worth a trial


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition with its reason and the place where it is written (`file:line`).

    A search obeys every rule. A published ladder and the dispatch of the library check legality
    rules only.
    """

    condition: Expr
    why: str
    where: str
    kind: RuleKind = RuleKind.LEGALITY


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """One kernel launch of a variant.

    Attributes:
        kernel: Name of the `extern "C"` kernel.
        grid: One to three expressions; if any is 0 the launch is skipped.
        block: One to three expressions.
        smem: Dynamic shared memory, bytes.
        args: In the kernel's order: names of tensors, workspaces, dims, scalars,
            `<tensor>_stride_<dim>`; or whole-number expressions, passed as `long long`. A tensor
            that a problem leaves out is passed as a null pointer, its strides as 0.
        pdl: Condition over parameters: whether the launch uses programmatic dependent launch, that
            is, may begin before the previous kernel in the stream has ended. None: never. The
            kernel of a later launch calls `griddepcontrol_wait` before it touches memory that the
            previous kernel reads or writes. The first kernel of a plan does not know what precedes
            it: each of its threads waits first, and only then lets the next kernel start.
        coresident: Whether CTAs of the kernel wait for each other at grid barriers: the template
            exports the kernel with KGEN_EXPORT_CTA_GROUPS. A GPU that cannot hold the whole grid at
            once is refused.
    """

    kernel: str
    grid: tuple[Expr, ...]
    block: tuple[Expr, ...]
    smem: Expr
    args: tuple[str | Expr, ...]
    pdl: Expr | None = None
    coresident: bool = False


@dataclass(frozen=True, slots=True)
class WorkspaceSpec:
    """Scratch device memory of a variant: `elements` of `dtype`, contents undefined at start."""

    name: str
    dtype: str
    elements: Expr


@dataclass(frozen=True, slots=True)
class Variant:
    """One algorithm for one pass.

    Attributes:
        name: Name of the variant and of its template `<pass>_<name>.cu.jinja`.
        pass_name: `forward` or `backward`.
        doc: What it does and, for a published variant, where it was published.
        params: Parameters in order.
        constants: Dims compiled into the kernel; the others are run-time arguments.
        requires: Rules over dims, dtypes, parameters and GPU facts.
        guards: Rules over a call's pointers and strides (`x_ptr`, `x_stride_M`), checked at
            every call of the generated library.
        launches: The plan, in order.
        workspaces: Scratch memory of the plan.
        first: Configs that a search tries first.
        safe: The config that is correct for every problem, or None. A variant with a safe config
            has neither constants nor guards.
        nondeterministic: Why launches on the same inputs may give different bits; empty if they
            must not.
        keeps_state: Why its kernels may use global variables, which live from one launch to the
            next; empty if they must not.
        untested: (condition as in the rendered source, why a certificate need not meet it and its
            opposite), for conditions that depend on the inputs and have one result in all of them.
        steady: (dim, extent) at which every ring buffer, exchange and persistent block is used
            again; a proof must reach these extents. Empty: `kgen.check.steady` infers them.
        where: `file:line` of its declaration.
        lets: (name, expression) that the expressions above or other lets use.
        settings: (name, value) by which a member of a family differs from the others; templates
            may use them.
    """

    name: str
    pass_name: str
    doc: str
    params: tuple[Param, ...]
    constants: tuple[str, ...]
    requires: tuple[Rule, ...]
    guards: tuple[Rule, ...]
    launches: tuple[LaunchSpec, ...]
    workspaces: tuple[WorkspaceSpec, ...]
    first: tuple[Config, ...]
    safe: Config | None
    where: str
    nondeterministic: str = ""
    keeps_state: str = ""
    untested: tuple[tuple[str, str], ...] = ()
    steady: tuple[tuple[str, Expr], ...] = ()
    lets: tuple[tuple[str, Expr], ...] = ()
    settings: tuple[tuple[str, Value], ...] = ()

    def inlined(self, expr: Expr) -> Expr:
        """One of the variant's expressions with its lets expanded."""
        return inlined(expr, dict(self.lets))

    @property
    def template(self) -> str:
        """File name of the template inside the operator's template folder."""
        return f"{self.pass_name}_{self.name}.cu.jinja"

    @property
    def size(self) -> int:
        """Number of configs before any rule."""
        total = 1
        for param in self.params:
            total *= len(param.choices)
        return total

    def config(self, values: Mapping[str, Value]) -> Config:
        """Return the config with these values, in declared order and without defaults.

        Args:
            values: The value of every parameter; parameters with a default may be left out.
        """
        said = [p for p in self.params if p.name in values or p.default is None]
        return Config(
            self.name,
            tuple((p.name, values[p.name]) for p in said if not p.is_default(values[p.name])),
        )

    def values(self, config: Config) -> dict[str, Value]:
        """Return the values of all parameters of a config, defaults included."""
        defaults = {p.name: p.default for p in self.params if p.default is not None}
        return {**defaults, **config.as_dict()}


@dataclass(frozen=True, slots=True)
class LadderStep:
    """One step of a published optimisation ladder, as a point of the search space.

    Attributes:
        name: The published name of the step.
        pass_name: `forward` or `backward`.
        config: The point of the search space that reproduces the published step.
        published: The published figure with its GPU, as text; empty if there is none.
        note: How the point differs from the published kernel; empty if it does not.
        is_published: Whether a published kernel takes the step; otherwise the step is kgen's own
            and goes beyond the published ones.
        where: `file:line` of its declaration.
    """

    name: str
    pass_name: str
    config: Config
    published: str
    note: str
    is_published: bool
    where: str


@dataclass(frozen=True, slots=True)
class Space:
    """All variants of one operator.

    Attributes:
        operator: Name of the operator.
        path: The file's name in messages.
        variants: Variants in declared order, pass after pass.
        ladder: Steps of the published table, in its order; empty if none is declared.
        family: The family whose templates the operator renders; empty if it belongs to none.
    """

    operator: str
    path: str
    variants: tuple[Variant, ...]
    ladder: tuple[LadderStep, ...] = ()
    family: str = ""

    @property
    def template_folder(self) -> str:
        """Name of the folder of its templates."""
        return self.family or self.operator

    def of_pass(self, pass_name: str) -> tuple[Variant, ...]:
        """Variants of a pass, in declared order."""
        return tuple(v for v in self.variants if v.pass_name == pass_name)

    def variant(self, pass_name: str, name: str) -> Variant:
        """Look up a variant.

        Raises:
            SpaceError: If there is none of that name.
        """
        known = self.of_pass(pass_name)
        for candidate in known:
            if candidate.name == name:
                return candidate
        raise SpaceError(
            f"{self.path}: {pass_name} has no variant '{name}'\n  "
            f"{suggest(name, [v.name for v in known])}"
        )

    def safe_variant(self, pass_name: str) -> Variant:
        """The variant that is correct for every problem of a pass.

        Raises:
            SpaceError: If none is declared.
        """
        for candidate in self.of_pass(pass_name):
            if candidate.safe is not None:
                return candidate
        raise SpaceError(f"{self.path}: {pass_name} declares no variant with 'safe'")
