"""The extents at which a pipelined kernel reaches its steady state.

A kernel that keeps chunks in a ring of shared memory reuses a slot only after as many chunks as
the ring has, and a persistent block takes a second batch only where there are more batches than
blocks. A proof on fewer is no proof of what the kernel does nearly all the time. So certificates
have one input set that reaches the steady state: a ring's stages and two chunks more, in every
part that a sequence is cut into, and likewise batches of a persistent block.

A variant may say itself how far that is (`steady:` in the search space). Else it follows from the
parameters by their names, and from the plan: a grid that stops growing is one of persistent blocks.
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

# Parameters, by what they are for.
_STEPS = ("chunk", "tokens", "batch")  # steps between two barriers, or of a slot of a ring
_CHUNKS = ("chunks",)  # that a slot holds
_ROUND = "segment"  # steps of a block between two exchanges with the others of its sequence
_SPLITS = ("segments", "splits", "t_splits", "t_blocks", "head_ctas", "blocks")  # of a sequence
_STEPS_UNSAID = 64  # of a variant that has no such parameter
_STAGES_UNSAID = 2
_EXCHANGES = 2  # rounds of blocks that exchange something
_MORE = 2  # chunks beyond the ring: the first slot used again, and what follows from that
_LARGEST_GRID = 2**14  # blocks; what still grows there is not persistent


def steady_extents(
    operator: Operator, variant: Variant, config: Config, problem: Problem, gpu: GpuProfile
) -> Extents:
    """Return the extents that a proof of a config must reach, by run-time dim.

    Args:
        operator: The operator; its `serial_dims` and `slab_dim` are looked at.
        variant: The config's variant.
        config: The config.
        problem: What is proven; extents of other dims come from there.
        gpu: Where the plan is for.
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
            # One step more: the last chunk is not a whole one.
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
    """The value of the first of the parameters that there is."""
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
    """The extent of a dim from which on the grid grows no more; 0 if it always does."""

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
