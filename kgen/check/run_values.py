"""Inputs with runs of zeros along their steps, as padding produces them: the set `runs of zeros`.

A kernel may skip a block of steps because an input is 0 there, and wrongly skip the decay of the
state as well. Other sets only have single zeros, random lines of zeros, or rows of nothing but
zeros.

The first, the middle or the last third of the steps is 0, or none; this alternates between rows and
between inputs. In operators without steps, it is a third of the last dim. Packed sequences have
equal lengths if the steps can be divided evenly; otherwise two sequences in the middle are empty.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kgen.check.row_values import row_numbers
from kgen.model.problem import Problem
from kgen.model.signature import Pass

RUNS = "runs of zeros"
_THIRDS = 3


def with_runs(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    row_dims: Sequence[str],
    steps: Collection[str],
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `RUNS`.

    Args:
        drawn: The inputs, by name.
        pass_: Declares their dims.
        problem: The problem at the extents of the set.
        row_dims: The slab dim and the dims that repeat the work, the slowest first.
        steps: The serial dims.
    """
    found = dict(drawn)
    place = 0
    for t in pass_.inputs:
        value = drawn[t.name]
        if not value.is_floating_point() or value.numel() == 0:
            continue
        along = [dim for dim in t.dims if dim in steps]
        if not steps:
            along = [t.dims[-1]]
        if not along or t.dims[-1] in (*row_dims, *steps):  # may be a divisor
            continue
        axis = t.dims.index(along[0])
        extent = value.shape[axis]
        shape = [1] * value.dim()
        shape[axis] = -1
        third = torch.arange(extent, device=value.device).view(shape) * _THIRDS // extent
        kind = (row_numbers(t.dims, value, problem, row_dims) + place) % (_THIRDS + 1)
        found[t.name] = torch.where(third == kind, torch.zeros_like(value), value)
        place += 1
    return found


def cut_for_runs(offsets: Tensor) -> Tensor:
    """Boundaries of packed sequences in the set."""
    count = offsets.numel() - 1
    steps = int(offsets[-1]) if count >= 0 else 0
    if count < 2:
        return offsets
    place = torch.arange(count + 1, device=offsets.device)
    if steps % count == 0 or count < 4:
        found = place * (steps // count)
    else:
        found = place * steps // count
        middle = count // 2
        found[middle : middle + 2] = found[middle - 1]
    found[-1] = steps
    return found.to(offsets.dtype)
