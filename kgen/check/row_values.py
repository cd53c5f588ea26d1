"""Inputs whose rows are of different kinds: a row of zeros, of equal values, or as drawn.

A row is what one index of the slab dim and of the dims that repeat the work selects: a line of
rmsnorm, a head of a sequence of wkv. The set `zero or equal by rows` shows what `first zero` and
`last zero` cannot: zeros in an input that is neither the first nor the last, and a row of equal
values, which a kernel may take for something else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kgen.model.problem import Problem
from kgen.model.signature import Pass

BY_ROWS = "zero or equal by rows"


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
        kind = _row_numbers(t.dims, value, problem, row_dims) % kinds
        if t.dims[-1] not in present and (t.name in linear or not is_serial):
            value = torch.where(kind == len(silent), value[..., :1], value)
        if t.name in silent:
            value = torch.where(kind == silent.index(t.name), torch.zeros_like(value), value)
        found[t.name] = value
    return found


def _row_numbers(
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
