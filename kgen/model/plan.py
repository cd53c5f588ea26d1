"""The launches that a config turns into for a problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kgen.errors import SpaceError
from kgen.model.config import Config
from kgen.model.expr import Expr
from kgen.model.gpu import GpuProfile
from kgen.model.problem import Problem
from kgen.model.space import LaunchSpec, Variant

MAX_GRID = (2**31 - 1, 65535, 65535)
OVERLAP_SINCE = 90  # compute capability from which on a launch can overlap what is before it


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch with concrete numbers.

    Attributes:
        kernel: Name of the `extern "C"` kernel.
        grid: Blocks in x, y, z.
        block: Threads in x, y, z.
        smem_bytes: Dynamic shared memory.
        args: Names, bound to values by a caller, or whole numbers.
        overlaps: Whether it may begin before the launch before it has ended. Never of the first
            launch that is not empty: what comes before a plan does not know of it.
        early: Whether it, the first, may begin before what came before the plan has ended.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    args: tuple[str | int, ...]
    overlaps: bool = False
    early: bool = False

    @property
    def overlaps_stream(self) -> bool:
        """Whether it may begin before what is before it in its stream has ended, whatever that is.

        All that a driver has to know.
        """
        return self.overlaps or self.early

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
) -> dict[str, Any]:
    """Values of every name that rules and launch expressions may use."""
    return {**gpu.names, **problem.names, **variant.values(config)}


def make_plan(variant: Variant, config: Config, problem: Problem, gpu: GpuProfile) -> Plan:
    """Evaluate a variant's launch expressions.

    Raises:
        SpaceError: If an extent is no whole number, negative, or beyond what CUDA can launch; or
            a launch overlaps what is before it on a GPU that cannot.
    """
    env = expression_names(variant, config, problem, gpu)
    launches: list[Launch] = []
    for spec in variant.launches:
        grid = _extents(spec.grid, env, variant, "grid", least=0, most=MAX_GRID)
        block = _extents(spec.block, env, variant, "block", least=1, most=(1024, 1024, 64))
        smem = _whole(spec.smem, env, variant, "smem")
        args = tuple(
            _whole(arg, env, variant, "argument") if isinstance(arg, Expr) else arg
            for arg in spec.args
        )
        given = spec, env, variant, gpu
        overlaps = _overlaps(spec.overlaps, "the one before it", *given) and not all(
            x.is_empty for x in launches
        )
        early = _overlaps(spec.early, "what came before its plan", *given)
        launches.append(Launch(spec.kernel, grid, block, smem, args, overlaps, early))
    workspaces = tuple(
        Workspace(w.name, w.dtype, _whole(w.elements, env, variant, w.name))
        for w in variant.workspaces
    )
    return Plan(tuple(launches), workspaces)


def _overlaps(
    condition: Expr | None,
    before: str,
    spec: LaunchSpec,
    env: dict[str, Any],
    variant: Variant,
    gpu: GpuProfile,
) -> bool:
    if condition is None or not condition(env):
        return False
    if not gpu.is_host and gpu.compute_capability < OVERLAP_SINCE:
        raise SpaceError(
            f"{variant.where}: launch '{spec.kernel}' overlaps {before} "
            f"('{condition.text}'), which takes sm_{OVERLAP_SINCE} or later; {gpu.name} is "
            f"{gpu.arch}\n  next: add a rule that allows it from compute_capability "
            f"{OVERLAP_SINCE} on"
        )
    return True


def _whole(expr: Expr, env: dict[str, Any], variant: Variant, what: str) -> int:
    value = expr(env)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SpaceError(
            f"{variant.where}: {what} '{expr.text}' is {value!r}, which is no whole number >= 0"
        )
    return value


def _extents(
    exprs: Sequence[Expr],
    env: dict[str, Any],
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
