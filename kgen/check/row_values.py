"""Inputs whose rows have different kinds of values.

A row is the part of a tensor at one index of the slab dim and of the dims that repeat the work: a
line in rmsnorm, one head of one sequence in wkv. Linear inputs are those in which all outputs are
linear.

`zero or equal by rows`: a row is zero in one input, has equal values, or is as drawn. Unlike `first
zero` and `last zero`, this set has zeros in inputs that are neither the first nor the last; and a
kernel may treat rows of equal values wrongly as a special case.

`tiny by rows`: in some rows one linear input is multiplied by 2^-64 (2^-10 in fp16). A kernel may
drop small values next to larger ones, but not where nothing is larger. In other rows the input is
multiplied by 2^40, unless a dtype is fp16.

`nan by rows`: in some rows every element of one linear input is a NaN with a negative sign. Other
sets have single NaNs of positive sign. In operators without steps, there are also rows with an Inf
and a -Inf in that input, and rows whose second half is -Inf, as a mask produces.

`signs by rows`: all elements of a linear input in one row have the same sign, negative or positive.
A running maximum that wrongly starts at 0 is right if a row has both signs.

The sets `tiny by rows` and `nan by rows` choose their own boundaries of packed sequences (`cut`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kgen.model.problem import Problem
from kgen.model.signature import Pass

BY_ROWS = "zero or equal by rows"
TINY_BY_ROWS = "tiny by rows"
NAN_BY_ROWS = "nan by rows"
ROW_SETS = (BY_ROWS, TINY_BY_ROWS, NAN_BY_ROWS)

SIGNS_BY_ROWS = "signs by rows"

_TINY = 2.0**-64
_HUGE = 2.0**40
_TINY_16 = 2.0**-10  # in fp16, whose smallest normal number is 2^-14


def with_row_values(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    is_serial: bool,
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `BY_ROWS`.

    With n linear inputs, rows cycle through n + 2 kinds: n kinds with zeros in one of these inputs,
    the first and the last input after all others; one kind with equal values along the last dim,
    in all inputs that allow them; one kind as drawn.

    Args:
        drawn: The inputs, by name.
        pass_: Declares their dims.
        problem: The problem at the extents of the set.
        linear: The linear inputs, which may have any values.
        row_dims: The slab dim and the dims that repeat the work, the slowest first.
        is_serial: Whether the operator has steps. Inputs that are not linear then stay as drawn:
            equal values could make a recurrence grow.
    """
    silent = _middle_first([name for name in drawn if name in linear])
    kinds = len(silent) + 2
    found = dict(drawn)
    for t in pass_.inputs:
        value = drawn[t.name]
        present = [dim for dim in row_dims if dim in t.dims]
        if not present or not value.is_floating_point() or value.numel() == 0:
            continue
        kind = row_numbers(t.dims, value, problem, row_dims) % kinds
        if t.dims[-1] not in present and (t.name in linear or not is_serial):
            value = torch.where(kind == len(silent), value[..., :1], value)
        if t.name in silent:
            value = torch.where(kind == silent.index(t.name), torch.zeros_like(value), value)
        found[t.name] = value
    return found


def with_row_signs(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
) -> dict[str, Tensor]:
    """Turn inputs into those of `SIGNS_BY_ROWS`; arguments as in `with_row_values`."""
    found = dict(drawn)
    for place, t in enumerate(t for t in pass_.inputs if t.name in linear):
        value = drawn[t.name]
        if not value.is_floating_point() or value.numel() == 0:
            continue
        row = row_numbers(t.dims, value, problem, row_dims)
        is_negative = (row // 2 ** (place % 2) + place // 2) % 2 == 0
        found[t.name] = torch.where(is_negative, -value.abs(), value.abs())
    return found


def with_special_rows(
    name: str,
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    is_serial: bool,
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `TINY_BY_ROWS` or `NAN_BY_ROWS`.

    Args:
        name: Name of the set.
        drawn, pass_, problem, linear, row_dims: As in `with_row_values`.
        is_serial: Whether the operator has steps; if not, inputs that are not linear change, too.
    """
    chosen = [
        t.name
        for t in pass_.inputs
        if drawn[t.name].is_floating_point()
        and (t.name in linear or not is_serial)
        and any(dim in t.dims for dim in row_dims)
    ]
    each = 3 if name == NAN_BY_ROWS and not is_serial else 1  # kinds of rows per input
    has_huge = name == TINY_BY_ROWS and not any(v.dtype == torch.float16 for v in drawn.values())
    if has_huge:
        each = 2
    kinds = each * len(chosen) + 1
    found = dict(drawn)
    for place, one in enumerate(_middle_first(chosen)):
        value = drawn[one]
        if value.numel() == 0:
            continue
        dims = next(t.dims for t in pass_.inputs if t.name == one)
        kind = row_numbers(dims, value, problem, row_dims) % kinds
        if name == TINY_BY_ROWS:
            tiny = value * (_TINY_16 if value.dtype == torch.float16 else _TINY)
            found[one] = torch.where(kind == place, tiny, value)
            if has_huge:
                found[one] = torch.where(kind == len(chosen) + place, value * _HUGE, found[one])
            continue
        found[one] = torch.where(kind == place, _negative_nan(value), value)
        if each == 3:
            found[one] = torch.where(
                kind == len(chosen) + place, _with_infinities(value), found[one]
            )
            if dims[-1] not in row_dims:  # else the second half would be other rows
                found[one] = torch.where(
                    kind == 2 * len(chosen) + place, _masked(value), found[one]
                )
    return found


def cut(name: str, offsets: Tensor) -> Tensor:
    """Boundaries of packed sequences that random ones rarely have, by the name of a set.

    `TINY_BY_ROWS`: the first and the last sequence have one step each, one in the middle has the
    others. `NAN_BY_ROWS`: one sequence in the middle has all steps. Other sets: every sequence but
    the last has one step.
    """
    count = offsets.numel() - 1
    steps = int(offsets[-1]) if count >= 0 else 0
    if count < 2:
        return offsets
    place = torch.arange(count + 1, device=offsets.device)
    middle = max(1, count // 2)
    if name == TINY_BY_ROWS:
        found = torch.where(place <= middle, min(1, steps), max(steps - 1, min(1, steps)))
        found[0] = 0
    elif name == NAN_BY_ROWS:
        found = torch.where(place <= middle, 0, steps)
    else:
        found = place.clamp_max(steps)
    found[-1] = steps
    return found.to(offsets.dtype)


def _negative_nan(value: Tensor) -> Tensor:
    """NaN with the sign bit set, by bit operations: fp16 and bf16 lose the sign of a Python NaN."""
    word = torch.int32 if value.element_size() == 4 else torch.int16
    nan = torch.full_like(value, torch.nan).view(word)
    return (nan | torch.iinfo(word).min).view(value.dtype)


def _with_infinities(value: Tensor) -> Tensor:
    """Inf at the first, and -Inf at the last element of each line."""
    found = value.clone(memory_format=torch.contiguous_format)
    found[..., 0] = torch.inf
    if value.shape[-1] > 2:
        found[..., -1] = -torch.inf
    return found


def _masked(value: Tensor) -> Tensor:
    """-Inf in the second half of each line."""
    found = value.clone(memory_format=torch.contiguous_format)
    found[..., (value.shape[-1] + 1) // 2 :] = -torch.inf
    return found


def row_numbers(
    dims: Sequence[str], value: Tensor, problem: Problem, row_dims: Sequence[str]
) -> Tensor:
    """The row number of each element, in a shape that broadcasts to the value's shape.

    In an input that lacks a row dim, rows have the numbers of that dim's index 0. So the inputs of
    one row agree in its number.
    """
    number = torch.zeros([1] * value.dim(), dtype=torch.int64, device=value.device)
    weight = 1
    for dim in reversed(row_dims):
        if dim in dims:
            shape = [1] * value.dim()
            shape[dims.index(dim)] = -1
            index = torch.arange(value.shape[dims.index(dim)], device=value.device)
            number = number + index.view(shape) * weight
        weight *= problem.dim(dim)
    return number


def _middle_first(names: list[str]) -> list[str]:
    """Move the first and the last name to the end.

    There may be fewer rows than kinds, and the sets `first zero` and `last zero` cover these two.
    """
    return [*names[1:-1], *names[:1], *names[1:][-1:]]
