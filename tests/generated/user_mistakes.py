"""Mistakes that a type checker finds: one in each line marked as a mistake (`test_types.py`)."""

from __future__ import annotations

import kgen_ops
from kgen_ops.nn import LinearAttention, RMSNorm
from torch import Tensor


def mistakes(x: Tensor, w: Tensor) -> None:
    """The calls are only type-checked, never run."""
    kgen_ops.wkv6(x, x, x, x, w, decay_form="loge")  # mistake: an option that does not exist
    kgen_ops.wkv7(x, x, x, x, x, x, decay_form="decay")  # mistake: an option of another operator
    kgen_ops.rmsnorm(x, epsilon=1.0)  # mistake: an argument that does not exist
    print(kgen_ops.rmsnorm(x, w, x).rstd)  # mistake: an output that was not requested
    y, h = kgen_ops.rmsnorm(x, w, x, return_rstd=True)  # mistake: three outputs
    print(kgen_ops.wkv6(x, x, x, x, w).y)  # mistake: one output is a tensor
    RMSNorm("16")  # mistake: not an extent
    LinearAttention(16, heads=2)  # mistake: an argument that does not exist
    kgen_ops.patch(x)  # mistake: not a module
    print(kgen_ops.patch(RMSNorm(16)).swaped)  # mistake: a field that does not exist
    print(y, h)
