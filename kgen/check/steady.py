"""The extents at which a pipelined kernel reaches its steady state.

A kernel with a ring buffer in shared memory reuses a slot only after as many chunks as the ring has
stages. A persistent CTA processes a second batch only if there are more batches than CTAs. An input
set with fewer does not cover what the kernel does most of the time. So certificates have one input
set that reaches the steady state: in each part of a split sequence, as many chunks as the ring has
stages, plus two; and likewise for the batches of persistent CTAs.

A variant may declare these extents (`steady:` in the search space). Otherwise they are derived from
the names of its parameters and from the plan: if the grid stops growing with a dim, its CTAs are
persistent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from kgen.model.config import Config
from kgen.model.expr import Names
from kgen.model.gpu import GpuProfile
from kgen.model.plan import expression_names, make_plan
from kgen.model.problem import Problem, with_dims
from kgen.model.space import Variant
from kgen.operators.base import Operator

Extents = tuple[tuple[str, int], ...]

# Names of parameters, by their meaning.
_STEPS = ("chunk", "tokens", "batch")  # steps between two barriers, or in a slot of a ring
_CHUNKS = ("chunks",)  # chunks in a slot
_ROUND = "segment"  # steps of a CTA between two exchanges with the other CTAs of its sequence
_SPLITS = ("segments", "splits", "t_splits", "t_blocks", "head_ctas", "blocks")  # per sequence
_STEPS_UNSAID = 64  # steps if a variant has none of these parameters
_STAGES_UNSAID = 2
_EXCHANGES = 2  # rounds to run, for CTAs that exchange data
_MORE = 2  # chunks beyond the ring's stages: the first reuses a slot, the second follows a reuse
_LARGEST_GRID = 2**14  # extent; a grid that still grows beyond it is not persistent


def steady_extents(
    operator: Operator, variant: Variant, config: Config, problem: Problem, gpu: GpuProfile
) -> Extents:
    """Return the extents that a certificate of a config must reach, by run-time dim.

    Args:
        operator: The operator; its `serial_dims` and `slab_dim` are used.
        variant: The config's variant.
        config: The config.
        problem: The problem to certify, with the extents of the other dims.
        gpu: The GPU of the plan.
    """
    found = dict(_declared(variant, config, problem, gpu))
    if found or variant.safe is not None:
        return tuple(found.items())
    values = variant.values(config)
    for dim in operator.serial_dims:
        if dim not in variant.constants:
            if _ROUND in values:
                each = _first(values, (_ROUND,), 0) * _EXCHANGES
            else:
                stages = _first(values, ("stages",), _STAGES_UNSAID)
                steps = max((_first(values, (name,), 0) for name in _STEPS), default=0)
                each = (steps or _STEPS_UNSAID) * _first(values, _CHUNKS, 1) * (stages + _MORE)
            # One step more, so that the last chunk is not a whole one.
            found[dim] = each * _first(values, _SPLITS, 1) + 1
    slab = operator.slab_dim
    batches = 0
    if slab is not None and slab not in (*variant.constants, *operator.repeats):
        batches = _persistent(operator, variant, config, problem, gpu, slab)
    if slab is not None and batches:
        found[slab] = batches * (_first(values, ("stages",), 0) + _MORE) + 1
    return tuple(found.items())


def _declared(
    variant: Variant, config: Config, problem: Problem, gpu: GpuProfile
) -> list[tuple[str, int]]:
    names: Names = expression_names(variant, config, problem, gpu)
    return [(dim, int(extent(names))) for dim, extent in variant.steady]


def _first(values: Mapping[str, object], names: Collection[str], unsaid: int) -> int:
    """The value of the first of the named parameters that exists and is an integer."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return unsaid


def _persistent(
    operator: Operator,
    variant: Variant,
    config: Config,
    problem: Problem,
    gpu: GpuProfile,
    dim: str,
) -> int:
    """The smallest extent of a dim at which the grid has stopped growing; 0 if it always grows."""

    def blocks(extent: int) -> int:
        shorter = with_dims(problem, {dim: extent}, operator.signature)
        launches = make_plan(variant, config, shorter, gpu).launches
        return sum(math.prod(launch.grid) for launch in launches)

    return _end_of_growth(blocks)


def _end_of_growth(blocks: Callable[[int], int]) -> int:
    most = blocks(_LARGEST_GRID)
    if most == blocks(2 * _LARGEST_GRID):
        below, above = 0, _LARGEST_GRID
        while above - below > 1:
            middle = (below + above) // 2
            below, above = (below, middle) if blocks(middle) == most else (middle, above)
        return above
    return 0
