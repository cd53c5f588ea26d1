"""Numeric features of a config for the models; they need no run.

There are two sets. Without compilation: parameters, the named expressions of the variant, launches
and the problem. After compilation also: registers, spills, static shared memory, and the numbers
that follow from them: resident CTAs, occupancy and waves.

Trees compare one feature at a time, so ratios that matter are separate features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kgen.errors import ExprError
from kgen.measure.floor import floor_us, rate_tflops
from kgen.model.config import Config
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Launch, Plan, expression_names, make_plan
from kgen.model.problem import Problem
from kgen.model.record import Resources
from kgen.model.space import Variant
from kgen.operators.base import Operator

COPY_SHARE = 0.89
"""Share of the peak bandwidth that a device copy reaches: 4282 of 4800 GB/s on an H200."""
_WARP = 32
_REGISTERS_PER_WARP = 256  # registers are allocated to warps in units of 256
_RESERVED_SMEM = 1024  # bytes that each CTA reserves, from compute capability 8.0 on


def floor_of(operator: Operator, pass_name: str, problem: Problem, gpu: GpuProfile) -> float:
    """The lower limit on the time of a call by the profile's rates, microseconds."""
    cost = operator.cost(pass_name, problem)
    return floor_us(cost, COPY_SHARE * gpu.bandwidth_gbps, rate_tflops(cost, gpu))


@dataclass(frozen=True, slots=True)
class Residency:
    """The occupancy of a launch.

    Attributes:
        blocks_per_sm: CTAs that an SM holds at once; 0: the launch does not fit.
        occupancy: Resident threads over the SM's maximum, 0 to 1.
        waves: CTAs of the grid over the CTAs that the GPU holds at once.
    """

    blocks_per_sm: int
    occupancy: float
    waves: float


def residency(launch: Launch, used: Resources | None, gpu: GpuProfile) -> Residency:
    """Compute the residency of a launch from the compiler's report, as CUDA's calculator does.

    Args:
        launch: The launch.
        used: The resources of its kernel; None: only threads and dynamic shared memory count.
        gpu: The GPU.
    """
    warps = math.ceil(launch.threads / _WARP)
    limits = [gpu.max_blocks_per_sm, gpu.max_threads_per_sm // (warps * _WARP)]
    smem = launch.smem_bytes
    if used is not None:
        smem += used.smem_bytes
        portion = math.ceil(max(used.registers, 1) * _WARP / _REGISTERS_PER_WARP)
        limits.append(gpu.regs_per_sm // (portion * _REGISTERS_PER_WARP) // warps)
    if smem:
        reserved = _RESERVED_SMEM if gpu.compute_capability >= 80 else 0
        limits.append(gpu.smem_per_sm // (smem + reserved))
    blocks = max(0, min(limits))
    grid = math.prod(launch.grid)
    return Residency(
        blocks,
        blocks * warps * _WARP / gpu.max_threads_per_sm,
        grid / (max(1, blocks) * gpu.sm_count),
    )


class Featurizer:
    """The features of the configs of one pass for one problem on one GPU."""

    def __init__(
        self, operator: Operator, pass_name: str, problem: Problem, gpu: GpuProfile
    ) -> None:
        self._problem, self._gpu = problem, gpu
        self.floor_us = floor_of(operator, pass_name, problem, gpu)
        cost = operator.cost(pass_name, problem)
        self._shared: dict[str, float] = {
            "log_bytes": _log(cost.bytes),
            "log_flops": _log(cost.flops),
            "log_floor": math.log2(max(self.floor_us, 1e-3)),
            "intensity": _log(cost.flops) - _log(cost.bytes),
        }
        self._shared |= {f"dim_{name}": _log(extent) for name, extent in problem.dims}
        self._shared |= {f"is_{field}_{choice}": 1.0 for field, choice in problem.dtypes}

    def of(
        self,
        variant: Variant,
        config: Config,
        resources: tuple[tuple[str, Resources], ...] | None,
    ) -> dict[str, float]:
        """Return the features by name; a name that another config has may be missing.

        Args:
            variant: The variant of the config.
            config: The config.
            resources: The compiler's report; None if it was not compiled.
        """
        plan = make_plan(variant, config, self._problem, self._gpu)
        used = dict(resources) if resources is not None else None
        found = dict(self._shared)
        found[f"variant_{variant.name}"] = 1.0
        for name, value in variant.values(config).items():
            found |= _of_value(f"p_{name}", value)
        found |= self._of_lets(variant, config)
        found |= dict(_of_plan(plan, used, self._gpu))
        if "total_threads" in found:
            for work in ("log_bytes", "log_flops"):
                found[f"{work}_per_thread"] = found[work] - found["total_threads"]
                found[f"{work}_per_resident"] = found[work] - found["resident_threads"]
        return found

    def _of_lets(self, variant: Variant, config: Config) -> dict[str, float]:
        env = expression_names(variant, config, self._problem, self._gpu)
        found: dict[str, float] = {}
        for name, _ in variant.lets:
            try:
                found |= _of_value(f"let_{name}", env[name])
            except ExprError:
                continue  # no value for this config, for example because of a division by 0
        return found


def _of_value(name: str, value: object) -> Mapping[str, float]:
    if isinstance(value, bool):
        return {name: float(value)}
    if isinstance(value, int | float):
        return {name: math.copysign(math.log2(1 + abs(value)), value)}
    return {f"{name}={value}": 1.0}


def _of_plan(
    plan: Plan, used: Mapping[str, Resources] | None, gpu: GpuProfile
) -> Iterator[tuple[str, float]]:
    launches = [launch for launch in plan.launches if not launch.is_empty]
    yield "launches", float(len(launches))
    yield "log_workspace", _log(sum(w.elements for w in plan.workspaces))
    if not launches:
        return
    # The launch with the most threads does most of the work.
    main = max(launches, key=lambda x: x.threads * math.prod(x.grid))
    resources = None if used is None else used.get(main.kernel)
    yield "log_threads", _log(main.threads)
    yield "log_grid", _log(math.prod(main.grid))
    yield "log_smem", _log(main.smem_bytes)
    yield "total_threads", _log(main.threads * math.prod(main.grid))
    fill = residency(main, resources, gpu)
    yield "blocks_per_sm", _log(fill.blocks_per_sm)
    yield "occupancy", fill.occupancy
    yield "log_waves", math.log2(max(fill.waves, 1e-3))
    yield "tail", fill.waves / math.ceil(fill.waves) if fill.waves > 0 else 0.0
    yield "resident_threads", _log(
        min(1.0, fill.waves) * fill.blocks_per_sm * main.threads * gpu.sm_count
    )
    yield from _of_use(main, fill, gpu)
    yield from _of_others([one for one in launches if one is not main], used, gpu)
    if used is not None:
        yield "registers", float(max((r.registers for r in used.values()), default=0))
        yield "main_registers", float(resources.registers if resources else 0)
        yield "log_spill", _log(sum(r.spill_bytes for r in used.values()))
        yield "log_stack", _log(sum(r.stack_bytes for r in used.values()))
        yield "log_smem_static", _log(resources.smem_bytes if resources else 0)


def _of_use(
    launch: Launch, fill: Residency, gpu: GpuProfile
) -> Iterator[tuple[str, float]]:
    """Features of a grid's use of the SMs; a grid of less than a wave does not reach its occupancy.
    """
    per_sm = math.prod(launch.grid) / gpu.sm_count
    active = min(fill.blocks_per_sm, math.ceil(per_sm))
    yield "log_per_sm", math.log2(per_sm)
    yield "balance", per_sm / math.ceil(per_sm)  # mean number of CTAs per SM over the maximum
    yield "log_active_warps", _log(active * math.ceil(launch.threads / _WARP))
    yield "log_rounds", math.log2(max(1, math.ceil(fill.waves)))


def _of_others(
    launches: Sequence[Launch], used: Mapping[str, Resources] | None, gpu: GpuProfile
) -> Iterator[tuple[str, float]]:
    """Features of the launches other than the main one; all launches run one after the other."""
    known = {} if used is None else used
    fills = [residency(one, known.get(one.kernel), gpu) for one in launches]
    yield "log_other_rounds", _log(sum(math.ceil(one.waves) for one in fills))
    yield "other_occupancy", min(
        (one.occupancy * min(1.0, one.waves) for one in fills), default=1.0)
    yield "log_other_threads", _log(sum(x.threads * math.prod(x.grid) for x in launches))
    if used is not None:
        yield "other_registers", float(
            max((used[x.kernel].registers for x in launches if x.kernel in used), default=0))


def _log(value: float) -> float:
    return math.log2(1 + value)
