"""What a dtype can hold, and how exactly."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kgen.model.dtypes import DType
from kgen.model.problem import Problem
from kgen.operators.base import Operator

# Flushed terms of a result, times what each is multiplied by afterwards. On an H200, gradients of
# wkv4 and wkv7 lost 10 smallest normal numbers where all decays were strong.
_FLUSHED = 1024


def torch_dtype(name: str) -> torch.dtype:
    """Look up `bfloat16` and the like."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def floor_of(dtype: torch.dtype) -> float:
    """Return the part of a bound that any implementation may use up, whatever its inputs.

    One ulp of the output's dtype (the rounding of the result, twice its half ulp), and four ulp
    of fp32 for the arithmetic before it (hardware's rsqrt, exp and division err by up to two).
    """
    return torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps


def rounding_of(operator: Operator, problem: Problem) -> DType | None:
    """Return the dtype that a problem lets its products' operands be rounded to, if any.

    That is a field that no tensor has, with a dtype that only rounds another one.
    """
    chosen = [problem.dtype(f.name) for f in operator.signature.rounding_fields()]
    return max((d for d in chosen if d.rounds), key=lambda d: d.eps, default=None)


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """Round fp32 to `bits` stored fraction bits, ties away from zero, as tensor cores' TF32 is.

    NaN and Inf are kept; a magnitude near the end of the range may become Inf.
    """
    dropped = 23 - bits
    words = x.view(torch.int32)
    rounded = (words + (1 << (dropped - 1))) & -(1 << dropped)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def smallest_scale(dtype: torch.dtype, enlarged: float = 1.0) -> float:
    """Return the magnitude below which an output's error stops shrinking with the output.

    fp16: the smallest normal number; below it, neighbours are equally far apart. fp32 and bf16:
    so much that terms which are subnormal in fp32 may be flushed to zero, as CUDA's fast arithmetic
    does, and then be summed or multiplied by more than 1 (`_FLUSHED`). `enlarged` is what the
    values of a set are multiplied by beyond ordinary ones: a weight that was flushed is multiplied
    by such a value, too.
    """
    if dtype == torch.float16:
        return torch.finfo(dtype).tiny
    return enlarged * _FLUSHED * torch.finfo(torch.float32).tiny / floor_of(dtype)


def overflow_threshold(dtype: torch.dtype) -> float:
    """Return the least magnitude that rounds to Inf in a dtype."""
    info = torch.finfo(dtype)
    ulp_of_largest = info.eps * 2.0 ** math.floor(math.log2(info.max))
    return info.max + ulp_of_largest / 2
