"""The call of wkv4 that its adapters share."""

from __future__ import annotations

import torch
from torch import Tensor

from ._library import operator_of

_OPERATOR = operator_of("wkv4")


def wkv4(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Call the operator of the library.

    Args:
        w: [C]; raw: the log decay is -exp(w).
        u: [C]. u and w are converted to fp32 if their dtype is neither fp32 nor the dtype of k.
        k, v: [B, T, C].
        initial_state: [B, C, 3] or None; copied if its dtype is not fp32 or its layout differs.
        return_final_state: Whether to return the final state.
    Returns:
        y [B, T, C], and the final state [B, C, 3] in fp32 or None.
    Raises:
        NotImplementedError: If the library has no such operator.
    """
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    w, u = (x if x.dtype in (k.dtype, torch.float32) else x.float() for x in (w, u))
    made = _OPERATOR(k, v, w, u, initial_state, return_final_state=return_final_state,
                     decay_form="raw")
    return made if return_final_state else (made, None)
