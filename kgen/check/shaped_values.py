"""Inputs with structure that random values lack: shaped, equal at all steps, or opposite.

Rows are those of `row_values`; linear inputs are those in which all outputs are linear.

`shapes by rows`: rows alternate between being sorted, having one nonzero element, having only
integers, being symmetric along the last dim, having one element 256 times as large, and having a
first half of zeros. This applies to linear inputs, and to all inputs of operators without steps.

`steps alike by rows`: in some rows an input has the values of the first step at all steps; a linear
input has values that rise from step to step in some other rows. Inputs that are not linear have
equal steps in the same rows: a recurrence could grow if only one factor of a product had them.
In operators without steps, all rows are equal.

`opposite by rows`: inputs of one shape and dtype are equal in some rows, and each other's negative
in some, although each has its own memory. The inputs are those that may share memory
(`with_shared_values`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kgen.check.row_values import row_numbers
from kgen.model.problem import Problem
from kgen.model.signature import Pass

SHAPES = "shapes by rows"
ALIKE = "steps alike by rows"
OPPOSITE = "opposite by rows"
SHAPED = (SHAPES, ALIKE, OPPOSITE)
_OUTLIER = 256.0


def with_shapes(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    is_serial: bool,
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `SHAPES`; arguments as in `with_row_values`."""
    found = dict(drawn)
    place = 0
    for t in pass_.inputs:
        value = drawn[t.name]
        if not value.is_floating_point() or value.numel() == 0 or t.dims[-1] in row_dims:
            continue
        if is_serial and t.name not in linear:
            continue
        shapes = _shapes_of(value)
        kind = (row_numbers(t.dims, value, problem, row_dims) + place) % (len(shapes) + 1)
        for number, shaped in enumerate(shapes):
            value = torch.where(kind == number, shaped, value)
        found[t.name] = value
        place += 1
    return found


def _shapes_of(value: Tensor) -> list[Tensor]:
    rising = value.sort(dim=-1).values
    place = torch.arange(value.shape[-1], device=value.device)
    zero = torch.zeros_like(value)
    whole = (value.float() * 2).round()
    whole = torch.where(whole == 0, torch.ones_like(whole), whole).to(value.dtype)
    return [
        rising,
        torch.where(place == 0, value, zero),
        torch.where(place == value.shape[-1] - 1, value, zero),
        whole,
        torch.where(place < (value.shape[-1] + 1) // 2, value, value.flip(-1)),
        torch.where(place == value.shape[-1] // 3, value * _OUTLIER, value),
        torch.where(place == value.shape[-1] // 2, value, zero),
        torch.where(place >= value.shape[-1] // 2, value, zero),
    ]


def with_steps_alike(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    steps: Collection[str],
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `ALIKE`; other arguments as in `with_row_values`.

    Args:
        steps: The serial dims; in operators without steps, the dim along which rows are equal.
    """
    found = dict(drawn)
    for place, t in enumerate(pass_.inputs):
        value = drawn[t.name]
        along = [axis for axis, dim in enumerate(t.dims) if dim in steps]
        if not along or not value.is_floating_point() or value.numel() == 0:
            continue
        row = row_numbers(t.dims, value, problem, row_dims)
        chosen = (row // (1 + place % 2) if t.name in linear else row) % 2 == 0
        if t.name in linear:  # sorted along the steps in some of the other rows
            value = torch.where(row % 4 == 3, value.sort(dim=along[0]).values, value)
        found[t.name] = torch.where(chosen, value.narrow(along[0], 0, 1), value)
    return found


def with_opposites(
    drawn: Mapping[str, Tensor],
    shared: Mapping[str, Tensor],
    of: Mapping[str, str],
    pass_: Pass,
    problem: Problem,
    row_dims: Sequence[str],
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `OPPOSITE`.

    Args:
        drawn: The inputs, by name.
        shared, of: From `with_shared_values`.
        pass_, problem, row_dims: As in `with_row_values`.
    """
    found = dict(shared)
    for t in pass_.inputs:
        if t.name in of:
            value = shared[t.name]
            # `with_shared_values` may have made the shared values smaller than drawn ones.
            largest = drawn[t.name].float().abs().amax().clamp_min(1e-9)
            ratio = (value.float().abs().amax() / largest).nan_to_num(1.0).clamp_max(1.0)
            own = drawn[t.name] * ratio
            kind = row_numbers(t.dims, value, problem, row_dims) % 3
            value = torch.where(kind == 1, -value, value)
            found[t.name] = torch.where(kind == 2, own.to(value.dtype), value)
    return found


def cut_to_one(name: str, offsets: Tensor) -> Tensor:
    """Boundaries of packed sequences: all steps in the first one (`SHAPES`), or in the second."""
    if offsets.numel() < 3:
        return offsets
    found = torch.full_like(offsets, int(offsets[-1]))
    found[0 if name == SHAPES else slice(0, 2)] = 0
    return found


def cut_to_last(offsets: Tensor) -> Tensor:
    """Boundaries of packed sequences: all steps in the last one."""
    found = torch.zeros_like(offsets)
    found[-1:] = offsets[-1:]
    return found
