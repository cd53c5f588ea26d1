"""The launch plan: the launches and workspaces of a config for a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kgen.errors import ExprError, SpaceError
from kgen.model.config import Config
from kgen.model.expr import Expr, Names
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.space import LaunchSpec, Variant

MAX_GRID = (2**31 - 1, 65535, 65535)
PDL_SINCE = 90  # first compute capability with programmatic dependent launch


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch with concrete numbers.

    Attributes:
        kernel: Name of the `extern "C"` kernel.
        grid: Blocks in x, y, z.
        block: Threads in x, y, z.
        smem_bytes: Dynamic shared memory.
        args: Names, which the caller binds to values, or whole numbers.
        pdl: Whether the launch uses programmatic dependent launch: the kernel may begin before the
            previous kernel in the stream has ended. It is False for a later launch of a plan whose
            earlier launches are all empty, because the kernel of a later launch does not wait for
            the kernel that precedes the plan.
        coresident: Whether the kernel's CTAs wait for each other at grid barriers. All of them must
            then be resident on the GPU at once.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    args: tuple[str | int, ...]
    pdl: bool = False
    coresident: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to launch (a grid extent of 0)."""
        return 0 in self.grid


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory: a flat tensor of `elements`."""

    name: str
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Launches in order, and the scratch memory that they share."""

    launches: tuple[Launch, ...]
    workspaces: tuple[Workspace, ...]


def expression_names(
    variant: Variant, config: Config, problem: Problem, gpu: GpuProfile
) -> Names:
    """Values of every name that rules and launch expressions may use."""
    values = {**gpu.names, **problem.names, **variant.values(config)}
    return Names(values, dict(variant.lets))


def make_plan(variant: Variant, config: Config, problem: Problem, gpu: GpuProfile) -> Plan:
    """Evaluate a variant's launch expressions.

    Raises:
        SpaceError: If an extent is no whole number, negative, or beyond what CUDA can launch; or
            if a launch uses programmatic dependent launch on a GPU without that feature.
    """
    return Planner(variant, gpu).plan(expression_names(variant, config, problem, gpu))


class Planner:
    """Makes the plans of many configs of a variant."""

    def __init__(self, variant: Variant, gpu: GpuProfile) -> None:
        """Find the launches with an argument that is an expression; most arguments are names."""
        self._variant, self._gpu = variant, gpu
        self._launches = [
            (spec, any(isinstance(arg, Expr) for arg in spec.args)) for spec in variant.launches
        ]

    def plan(self, env: Names) -> Plan:
        """Evaluate the launch expressions for the config and problem of `expression_names`.

        Raises:
            SpaceError: See `make_plan`.
        """
        variant = self._variant
        launches: list[Launch] = []
        for spec, computed in self._launches:
            grid = _extents(spec.grid, env, variant, "grid", least=0, most=MAX_GRID)
            block = _extents(spec.block, env, variant, "block", least=1, most=(1024, 1024, 64))
            smem = _whole(spec.smem, env, variant, "smem")
            pdl = _uses_pdl(spec, env, variant, self._gpu)
            if pdl and launches and all(launch.is_empty for launch in launches):
                pdl = False
            args = _args(spec, env, variant) if computed else cast("tuple[str, ...]", spec.args)
            launches.append(Launch(spec.kernel, grid, block, smem, args, pdl, spec.coresident))
        workspaces = tuple(
            Workspace(w.name, w.dtype, _whole(w.elements, env, variant, w.name))
            for w in variant.workspaces
        )
        return Plan(tuple(launches), workspaces)


def _args(spec: LaunchSpec, env: Names, variant: Variant) -> tuple[str | int, ...]:
    return tuple(
        _whole(arg, env, variant, "argument") if isinstance(arg, Expr) else arg
        for arg in spec.args
    )


def _uses_pdl(spec: LaunchSpec, env: Names, variant: Variant, gpu: GpuProfile) -> bool:
    if spec.pdl is None or not spec.pdl(env):
        return False
    if not gpu.is_host and gpu.compute_capability < PDL_SINCE:
        raise SpaceError(
            f"{variant.where}: launch '{spec.kernel}' uses programmatic dependent launch "
            f"('pdl: {spec.pdl.text}'), which takes sm_{PDL_SINCE} or later; {gpu.name} is "
            f"{gpu.arch}\n  next: add a rule that allows it from compute_capability {PDL_SINCE} on"
        )
    return True


def _whole(expr: Expr, env: Names, variant: Variant, what: str) -> int:
    try:
        value = expr(env)
    except ExprError as problem:
        raise SpaceError(f"{variant.where}: {what} {problem}") from None
    if type(value) is int and value >= 0:  # a bool is not a whole number
        return value
    raise SpaceError(
        f"{variant.where}: {what} '{expr.text}' is {value!r}, which is not a whole number >= 0"
    )


def _extents(
    exprs: Sequence[Expr],
    env: Names,
    variant: Variant,
    what: str,
    least: int,
    most: tuple[int, int, int],
) -> tuple[int, int, int]:
    values = [_whole(expr, env, variant, what) for expr in exprs]
    values += [1] * (3 - len(values))
    for value, limit in zip(values, most, strict=True):
        if not least <= value <= limit:
            raise SpaceError(
                f"{variant.where}: {what} {tuple(values)} is out of CUDA's range {least}..{most}"
            )
    return values[0], values[1], values[2]
