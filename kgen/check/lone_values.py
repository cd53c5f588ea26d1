"""Inputs as they come from some losses and untrained models: all ones, or zero except at one step.

Rows are those of `row_values`; linear inputs are those in which all outputs are linear.

`ones`: the first linear input is 1 everywhere, as the gradient of sum() is; so are linear inputs
without the slab dim, such as a gain.

`one step by rows`: the first linear input (in a backward pass, the gradient of an output) is
nonzero in a row only at the last, the first or a middle step, at one element, or in the second half
of the steps. A loss of the last token, for example, gives such a gradient. In operators without
steps the same holds along each column; one row has one element, and one row none. Each other linear
input is 1 everywhere in some rows. Those without a step dim, such as a state, are the unit matrix
in some rows, and have one nonzero element or line in others. Inputs without the slab dim are 0 in
operators with steps.

`with_kinds_of_decays` adds to `shapes by rows` decays (inputs that are not linear) that are 0,
tiny, zero except in one feature, or equal along their last dim. Equal decays get the root mean
square of the drawn ones, so that no recurrence grows. If a recurrence has several such inputs, they
change only in fp32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kgen.check.row_values import row_numbers
from kgen.model.problem import Problem
from kgen.model.signature import Pass

ONES = "ones"
ONE_STEP = "one step by rows"
LONE = (ONES, ONE_STEP)

_TINY = 2.0**-30


def with_ones(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    linear: frozenset[str],
    row_dims: Sequence[str],
    steps: Collection[str],
    weights: Collection[str],
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `ONES`.

    Args:
        drawn, pass_, linear, row_dims: As in `with_row_values`.
        steps: The serial dims; empty in operators without steps.
        weights: The inputs without the slab dim.
    """
    found = dict(drawn)
    others = _of_any_value(drawn, pass_, linear, row_dims, steps)
    for name in (name for place, name in enumerate(others) if place == 0 or name in weights):
        found[name] = torch.ones_like(drawn[name])
    return found


def with_one_step(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    steps: Collection[str],
    weights: Collection[str],
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `ONE_STEP`; other arguments as in `with_ones`.

    Args:
        problem: As in `with_row_values`.
    """
    found = dict(drawn)
    dims_of = {t.name: t.dims for t in pass_.inputs}
    others = _of_any_value(drawn, pass_, linear, row_dims, steps)
    for place, name in enumerate(others):
        value, dims = drawn[name], dims_of[name]
        row = row_numbers(dims, value, problem, row_dims)
        along = [axis for axis, dim in enumerate(dims) if dim in steps]
        if place == 0:
            chosen = _few_steps(value, along[0], row % 7) if along else _few_rows(value)
            found[name] = torch.where(chosen, value, torch.zeros_like(value))
        elif steps and not along and name not in weights and set(dims[-2:-1]) - set(row_dims):
            down = torch.arange(value.shape[-2], device=value.device)[:, None]
            right = torch.arange(value.shape[-1], device=value.device)
            one = torch.where(down + right == 0, value, torch.zeros_like(value))
            unit = (down == right).to(value.dtype).expand_as(value)
            line = torch.where(down == 0, value, torch.zeros_like(value))
            for number, changed in enumerate((one, unit, line)):
                value = torch.where((row + place) % 4 == number, changed, value)
            found[name] = value
        if place > 0 and name not in weights:  # one input per row: two would add rounding errors
            ones = row % len(others) == place
            found[name] = torch.where(ones, torch.ones_like(value), found[name])
    if steps:  # in operators without steps, a weight may be a divisor
        numbers = [name for name in weights if drawn[name].is_floating_point()]
        found |= {name: torch.zeros_like(drawn[name]) for name in numbers}
    return found


def with_kinds_of_decays(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    steps: Collection[str],
) -> dict[str, Tensor]:
    """Change the inputs that are not linear and have several features at each step, as decays have.

    In some rows one of these inputs is 0, tiny, or 0 except for the first feature. In one kind of
    rows all of them are equal along the last dim. This is not combined with gradients that are 0 at
    most steps: results would be far smaller than the terms from which they are computed. Several
    such inputs (wkv7 has three) have the same effect, so they change only in fp32.
    """
    found = dict(drawn)
    dims_of = {t.name: t.dims for t in pass_.inputs}
    own = [
        t.name
        for t in pass_.inputs
        if t.name not in linear
        and drawn[t.name].is_floating_point()
        and drawn[t.name].numel() > 0
        and any(dim in steps for dim in t.dims)
        and t.dims[-1] not in (*row_dims, *steps)
    ]
    if len(own) > 1 and any(drawn[name].dtype is not torch.float32 for name in own):
        return found
    kinds = 3 * len(own) + 2
    for place, name in enumerate(own):
        value = drawn[name]
        row = row_numbers(dims_of[name], value, problem, row_dims)
        kind = row % kinds
        first = torch.arange(value.shape[-1], device=value.device) == 0
        zero = torch.zeros_like(value)
        equal = _equal(value, dims_of[name], row // kinds % 2 == 0, steps)
        for number, changed in enumerate((zero, torch.where(first, value, zero), value * _TINY)):
            value = torch.where(kind == 1 + number * len(own) + place, changed, value)
        found[name] = torch.where(kind == 0, equal, value)
    return found


def _equal(
    value: Tensor, dims: Sequence[str], are_alike: Tensor, steps: Collection[str]
) -> Tensor:
    """Replace each line along the last dim by its root mean square with the sign of its first
    element; in the rows of `are_alike`, all steps get the first step's number.
    """
    size = value.float().square().mean(-1, keepdim=True).sqrt()
    equal = (value[..., :1].sign() * size).to(value.dtype)
    for axis in (axis for axis, dim in enumerate(dims) if dim in steps):
        equal = torch.where(are_alike, equal.narrow(axis, 0, 1), equal)
    return equal.expand_as(value)


def _few_steps(value: Tensor, axis: int, kind: Tensor) -> Tensor:
    """Mask of the nonzero elements, by the kind of a row.

    Kinds: 0 the last step, 1 the first, 2 the middle one, 3 one element in the middle, 4 the second
    half of the steps, 5 the first element, 6 all elements.
    """
    shape = [1] * value.dim()
    shape[axis] = -1
    extent = value.shape[axis]
    step = torch.arange(extent, device=value.device).view(shape)
    place = torch.arange(value.shape[-1], device=value.device)
    chosen = (kind == 0) & (step == extent - 1)
    chosen = chosen | ((kind == 1) & (step == 0))
    chosen = chosen | ((kind == 2) & (step == extent // 2))
    chosen = chosen | ((kind == 3) & (step == extent // 3) & (place == value.shape[-1] // 2))
    chosen = chosen | ((kind == 4) & (step >= extent // 2))
    return chosen | ((kind == 5) & (step == 0) & (place == 0)) | (kind > 5)


def _few_rows(value: Tensor) -> Tensor:
    """As `_few_steps` along the rows of an input without steps, the kind depending on the column;
    one row has one element, and one row none.
    """
    columns = value.shape[-1]
    place = torch.arange(columns, device=value.device)
    chosen = _few_steps(value, 0, place % 4) | (place % 4 == 3)
    row = torch.arange(value.shape[0], device=value.device).view(-1, *[1] * (value.dim() - 1))
    if value.shape[0] > 4:
        chosen = torch.where(row == 2, place == columns // 2, chosen)
    return chosen & (row != 1) if value.shape[0] > 2 else chosen


def _of_any_value(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    linear: frozenset[str],
    row_dims: Sequence[str],
    steps: Collection[str],
) -> list[str]:
    """The inputs that may have any values and have more than one number per row."""
    return [
        t.name
        for t in pass_.inputs
        if drawn[t.name].is_floating_point()
        and drawn[t.name].numel() > 0
        and (t.name in linear or not steps)
        and t.dims[-1] not in row_dims
    ]
