"""Compares a kernel's output with the oracle, and describes the errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kgen.check.bounds import Bound
from kgen.check.buffers import PATTERN
from kgen.check.oracle import Reference, Slab
from kgen.check.precision import overflow_threshold


def scaled_error(y: Tensor, reference: Reference, bound: float) -> Tensor:
    """Return the largest |y - y64| / scale as a 0-d fp32 tensor, without synchronising.

    NaN and Inf count as 0 where the oracle requires or allows them, and make the result NaN or Inf
    anywhere else.
    """
    if y.numel() == 0:
        return torch.zeros((), device=y.device)
    smallest, largest = torch.aminmax(_signed_error(y, reference, bound))  # propagates NaN
    return torch.maximum(smallest.abs(), largest.abs())


def summed_errors(y: Tensor, reference: Reference, bound: float) -> Tensor:
    """Return the sums of (y - y64) / scale and of the same times sign(y64), as float64.

    The first sum is far from 0 if a constant is added to the output, the second if the output is
    too large or too small by a factor. Elements that must be NaN or Inf count as 0. For an output
    of 16 bits, y64 is rounded to its dtype first: all elements of c * x with c = 1.002 and x in
    bf16 round to the same side, even in the best kernel.
    """
    error = _signed_error(y, reference, bound)
    if y.element_size() == 2:
        rounding = reference.high.to(y.dtype).float().sub_(reference.high)
        error = error - rounding.mul_(reference.inverse).nan_to_num_(0.0, 0.0, 0.0)
    return torch.stack([
        error.sum(dtype=torch.float64),
        (error * reference.high.nan_to_num().sign()).sum(dtype=torch.float64),
    ])


def _signed_error(y: Tensor, reference: Reference, bound: float) -> Tensor:
    """(y - y64) / scale in fp32; 0 where a NaN or Inf is right.

    The subtraction of `high` is exact wherever y is near it (Sterbenz). So fp32 is accurate enough,
    at half of float64's traffic.
    """
    error = torch.sub(y, reference.high)
    if error.dtype != torch.float32:
        error = error.float()
    if reference.low is None:
        error.mul_(reference.inverse)
    else:
        error = torch.addcmul(reference.low, error, reference.inverse, out=error)
    if reference.special is None:
        return error
    # Right are: a NaN where the oracle has NaN, if the kernel wrote it; an Inf of the right sign
    # where the oracle has Inf, or where a value within the bound rounds to Inf.
    high = reference.high
    reach = high.abs() + bound / reference.inverse
    infinite = (
        y.isinf()
        & (y.signbit() == high.signbit())
        & (high.isinf() | (reach >= overflow_threshold(y.dtype)))
    )
    excused = (y.isnan() & high.isnan() & ~_is_unwritten(y)) | (infinite & ~high.isnan())
    return error.masked_fill_(reference.special & excused, 0.0)


@dataclass(frozen=True, slots=True)
class _Worst:
    error: float
    index: tuple[int, ...]
    got: float
    want: float
    allowed: float


def explain(
    name: str,
    y: Tensor,
    dims: tuple[str, ...],
    bound: Bound,
    references: Iterable[tuple[Slab, Reference]],
) -> str:
    """Describe the elements out of bound in two lines: their number, and the worst of them."""
    wrong = unwritten = 0
    worst: _Worst | None = None
    for slab, reference in references:
        part = slab.of(y, dims)
        if part.numel() == 0:
            continue
        error = _signed_error(part, reference, bound.bound).abs()
        error = torch.where(error.isnan(), torch.inf, error)
        bad = error > bound.bound
        wrong += int(bad.sum())
        unwritten += int((bad & _is_unwritten(part)).sum())
        place = int(error.argmax())
        if worst is None or float(error.flatten()[place]) > worst.error:
            worst = _describe(part, error, reference, place, slab, dims, bound.bound)
    assert worst is not None
    if not wrong:
        return f"{name} was out of bound in an earlier launch on these inputs, not in the last"
    lines = f"{wrong} of {y.numel()} elements of {name} out of bound"
    if unwritten:
        lines += f", {unwritten} of them never written"
    where = ", ".join(str(i) for i in worst.index)
    return (
        f"{lines}\n  worst {name}[{where}] = {worst.got:.6g}, want {worst.want:.6g} "
        f"+- {worst.allowed:.2g}"
    )


def _describe(
    part: Tensor,
    error: Tensor,
    reference: Reference,
    place: int,
    slab: Slab,
    dims: tuple[str, ...],
    bound: float,
) -> _Worst:
    index = []
    rest = place
    for extent in reversed(part.shape):
        index.append(rest % extent)
        rest //= extent
    index.reverse()
    at = tuple(index)
    inverse = float(reference.inverse[at])
    want = float(reference.high[at])
    if reference.low is not None and inverse > 0:
        want -= float(reference.low[at]) / inverse
    if slab.dim is not None and slab.dim in dims:
        index[dims.index(slab.dim)] += slab.start
    allowed = bound / inverse if inverse > 0 else 0.0
    return _Worst(float(error[at]), tuple(index), float(part[at]), want, allowed)


def _is_unwritten(y: Tensor) -> Tensor:
    bits = y.reshape(-1).view(torch.int16).view(y.numel(), -1)
    return (bits == PATTERN).all(dim=1).view(y.shape)
