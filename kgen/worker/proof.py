"""Verifies one candidate on a device, and returns the sets, seeds and launches as evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from kgen.check import LAUNCHES, Fixture, Verdict, verify
from kgen.check.sizes import MANY_ROWS
from kgen.check.steady import Extents, steady_extents
from kgen.launch import Module
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Launch, Plan, Workspace, make_plan
from kgen.model.problem import Problem
from kgen.model.record import Evidence, Tried
from kgen.model.signature import Pass
from kgen.operators.base import Operator
from kgen.worker.binding import Call, admission, bind
from kgen.worker.messages import Trial

WIDE_SMS = 132
"""Number of SMs for a host run's sets with `MANY_ROWS`: as many persistent CTAs and partial sums as
on an H200. Other sets have one SM, so that CTAs process several batches even with few rows."""


def verdict_of(
    fixture: Fixture,
    module: Module,
    trial: Trial,
    operator: Operator,
    gpu: GpuProfile,
    *,
    on_host: bool,
    begins: Callable[[int], None] = lambda place: None,
) -> Verdict:
    """Launch a trial's candidate on the input sets of its level and compare with the oracle.

    Args:
        fixture: The fixture of the trial's pass and problem.
        module: The candidate's loaded module.
        trial: The candidate, its level, seeds and orders of threads.
        operator: The operator of the trial.
        gpu: The GPU that the candidate's launches are planned for.
        on_host: Whether the module runs on the host layer.
        begins: Called with the index of each set in the run's schedule before the set is made.
    Raises:
        LaunchError: If a launch fails.
        RuntimeError, MemoryError: PyTorch's, if the sets do not fit the device.
    """
    candidate = trial.candidate
    pass_ = operator.signature.pass_named(trial.pass_name)

    def gpu_for(rows: int) -> GpuProfile:
        is_wide = trial.level == "host" and rows >= MANY_ROWS
        return replace(gpu, sm_count=WIDE_SMS) if is_wide else gpu

    def plan_of(problem: Problem) -> Plan:
        slab = operator.slab_dim
        rows = 0 if slab is None else problem.dim(slab)
        return make_plan(candidate.variant, candidate.config, problem, gpu_for(rows))

    def workspaces(problem: Problem) -> Sequence[Workspace]:
        return plan_of(problem).workspaces

    def threads(problem: Problem) -> int:
        return sum(math.prod(x.grid) * x.threads for x in plan_of(problem).launches)

    def bound(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> Call:
        rows = _extent(operator.slab_dim, pass_, tensors)
        return bind(
            module, candidate, operator, gpu_for(rows), trial.pass_name, trial.problem, tensors,
            scalars,
        )

    guards = admission(candidate, gpu, pass_)

    def admits(numbers: Mapping[str, int | str], tensors: Mapping[str, torch.Tensor]) -> bool:
        if not guards(numbers, tensors):
            return False
        dims = tuple((name, int(numbers[name])) for name, _ in trial.problem.dims)
        if on_host or dims == trial.problem.dims:  # the problem itself is never skipped
            return True
        launches = make_plan(
            candidate.variant, candidate.config, replace(trial.problem, dims=dims), gpu).launches
        return has_room(module, launches, _sm_count(fixture.device))

    return verify(
        fixture,
        bound,
        trial.level,
        workspaces=workspaces,
        admits=admits,
        constants=candidate.variant.constants,
        seed=trial.seeds[1] if trial.seeds else None,
        bitwise=not candidate.variant.nondeterministic,
        launches=_launches(trial, on_host),
        steady=_steady(trial, operator, gpu),
        threads=threads,
        far=_has_several_orders(trial),
        part=trial.part,
        begins=begins,
    )


def _extent(dim: str | None, pass_: Pass, tensors: Mapping[str, torch.Tensor]) -> int:
    """The extent of a dim in the first tensor that has it; 0 if none has it."""
    for t in pass_.tensors:
        if dim in t.dims and t.name in tensors:
            return tensors[t.name].shape[t.dims.index(dim)]
    return 0


def has_room(module: Module, launches: Sequence[Launch], sm_count: int) -> bool:
    """Whether all CTAs that wait for each other at grid barriers are resident at the same time.

    The library makes the same check before a launch, and serves other calls with another kernel.
    """
    return all(
        launch.blocks <= sm_count * module.occupancy(
            launch.kernel, launch.threads, launch.smem_bytes)
        for launch in launches
        if launch.coresident and not launch.is_empty
    )


def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def evidence_of(trial: Trial, seed: int, verdict: Verdict, on_host: bool) -> Evidence:
    """The evidence for a record: sets, seeds and launches, so that the check can be repeated."""
    return Evidence(
        seed=seed,
        tried=tuple(Tried(*each) for each in zip(verdict.cases, verdict.seeds, strict=True)),
        skipped=verdict.skipped,
        launches=_launches(trial, on_host),
        bitwise=not trial.candidate.variant.nondeterministic,
    )


def _has_several_orders(trial: Trial) -> bool:
    # A trial with one order of threads runs under AddressSanitizer or a tool, which copies all
    # memory between the tensors. Faults that occur only in the steady state are races, which the
    # runs with several orders reveal.
    return trial.level == "host" and len(trial.orders) > 1


def _steady(trial: Trial, operator: Operator, gpu: GpuProfile) -> Extents:
    # If comparisons are watched, some occur only in the steady state: `stage == kStages`.
    if not _has_several_orders(trial) and not trial.comparisons:
        return ()
    candidate = trial.candidate
    return steady_extents(operator, candidate.variant, candidate.config, trial.problem, gpu)


def _launches(trial: Trial, on_host: bool) -> int:
    """Launches on the values of each input set, see `kgen.check.LAUNCHES`."""
    if trial.orders:
        # One launch for tools and for builds that start a process per launch. Otherwise at least
        # three, so that launches on the same values have two orders.
        return 1 if len(trial.orders) == 1 else max(3, len(trial.orders))
    # With one order of threads a CPU always computes the same bits. Three launches reveal effects
    # of earlier launches; more would reveal nothing else.
    return min(3, LAUNCHES[trial.level]) if on_host else LAUNCHES[trial.level]
