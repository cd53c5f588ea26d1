"""Range and precision of dtypes, and the part of error bounds that follows from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kgen.model.dtypes import DType
from kgen.model.problem import Problem
from kgen.operators.base import Operator

# Number of subnormal terms of a result that may be flushed, times the factor that each would have
# been multiplied by. On an H200, gradients of wkv4 and wkv7 lost 10 times the smallest normal
# number where all decays were strong.
_FLUSHED = 1024


def torch_dtype(name: str) -> torch.dtype:
    """Look up `bfloat16` and the like."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def floor_of(dtype: torch.dtype) -> float:
    """Return the part of a bound that does not depend on the definition's error.

    It is one ulp of the output's dtype (twice the half ulp of rounding the result), and four ulp of
    fp32 for the arithmetic before it (hardware rsqrt, exp and division err by up to two ulp).
    """
    return torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps


def rounding_of(operator: Operator, problem: Problem) -> DType | None:
    """Return the dtype to which a problem lets kernels round the operands of products, if any.

    It is the value of a dtype field that no tensor has, and it only rounds: TF32, for example,
    rounds fp32.
    """
    chosen = [problem.dtype(f.name) for f in operator.signature.rounding_fields()]
    return max((d for d in chosen if d.rounds), key=lambda d: d.eps, default=None)


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """Round fp32 to `bits` stored fraction bits, ties away from zero, as cvt.rna.tf32 does.

    NaN and Inf are kept; a magnitude near the end of the range may become Inf.
    """
    dropped = 23 - bits
    words = x.view(torch.int32)
    rounded = (words + (1 << (dropped - 1))) & -(1 << dropped)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def smallest_scale(dtype: torch.dtype, enlarged: float = 1.0) -> float:
    """Return the magnitude below which an output's error stops shrinking with the output.

    In fp16 it is the smallest normal number, below which the spacing of numbers is constant. In
    fp32 and bf16 it is large enough that a kernel may flush subnormal fp32 terms to zero, as CUDA's
    fast arithmetic does, before it sums them or multiplies them by more than 1 (`_FLUSHED`).
    `enlarged` is the factor between the values of a set and ordinary ones: a flushed weight would
    have been multiplied by such a value, too.
    """
    if dtype == torch.float16:
        return torch.finfo(dtype).tiny
    return enlarged * _FLUSHED * torch.finfo(torch.float32).tiny / floor_of(dtype)


def overflow_threshold(dtype: torch.dtype) -> float:
    """Return the smallest magnitude that rounds to Inf in a dtype."""
    info = torch.finfo(dtype)
    ulp_of_largest = info.eps * 2.0 ** math.floor(math.log2(info.max))
    return info.max + ulp_of_largest / 2
