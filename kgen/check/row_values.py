"""Inputs whose rows are of different kinds: a row of zeros, of equal values, or as drawn.

A row is what one index of the slab dim and of the dims that repeat the work selects: a line of
rmsnorm, a head of a sequence of wkv. The set `zero or equal by rows` shows what `first zero` and
`last zero` cannot: zeros in an input that is neither the first nor the last, and a row of equal
values, which a kernel may take for something else.

`tiny by rows`: one of the inputs in which outputs are linear is 2^-64 times as large (2^-10 in
fp16) in some rows: what a kernel drops because it is small must not be dropped where nothing is
larger. In other rows, where no dtype is fp16, it is 2^40 times as large.

`nan by rows`: one of these inputs is NaN with a negative sign in some rows, at every element. Other
sets have one NaN, of a positive sign. Where steps do not follow each other, there are rows with an
Inf and a -Inf in that input, too, and rows whose second half is -Inf, as masks leave them.

`signs by rows`: all elements of an input in which outputs are linear have one sign in a row,
negative or positive. A maximum that begins at 0 is right for inputs of both signs.

A set of each kind cuts packed sequences in a way of its own (`cut`).
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
_TINY_16 = 2.0**-10  # in fp16, whose least normal number is 2^-14


def with_row_values(
    drawn: Mapping[str, Tensor],
    pass_: Pass,
    problem: Problem,
    linear: frozenset[str],
    row_dims: Sequence[str],
    is_serial: bool,
) -> dict[str, Tensor]:
    """Turn ordinary inputs into those of `BY_ROWS`.

    With n inputs in which outputs are linear, rows are of n + 2 kinds in turn: n with zeros in one
    of these inputs, those in the middle first; one with equal values along the last dim of all
    inputs that may have them; one as drawn.

    Args:
        drawn: The inputs, by name.
        pass_: Declares their dims.
        problem: Of the set.
        linear: The inputs in which outputs are linear: they take any values.
        row_dims: The slab dim and the dims that repeat the work, the slowest first.
        is_serial: Whether steps follow each other. Other inputs than linear ones then stay as
            drawn: a recurrence could grow by equal values.
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
    """Turn inputs into those of `SIGNS_BY_ROWS`; arguments as of `with_row_values`."""
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
        name: Of the set.
        drawn, pass_, problem, linear, row_dims: As of `with_row_values`.
        is_serial: Whether steps follow each other; else inputs in which outputs are not linear
            take part, too.
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
    """Where packed sequences begin in a set, in ways that random cuts hardly give.

    `TINY_BY_ROWS`: the first and the last sequence have one step, one in the middle the others.
    `NAN_BY_ROWS`: one in the middle has all steps. Else every sequence but the last has one.
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
    """NaN with the sign bit; arithmetic with a NaN of Python loses the sign in 16 bits."""
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
    """The number of each element's row, in a shape that broadcasts to the value's.

    Inputs that lack a row dim have the numbers of its index 0, so that the inputs of one row agree.
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
    """Put the first and the last name at the end: they have sets of their own, and there may be
    fewer rows than kinds."""
    return [*names[1:-1], *names[:1], *names[1:][-1:]]
