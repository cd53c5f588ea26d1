"""The call of wkv7 that all RWKV-7 adapters share."""

from __future__ import annotations

from torch import Tensor

from ._library import operator_of

_OPERATOR = operator_of("wkv7")


def wkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    decay_form: str,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Call the operator of the library.

    Args:
        r, w, k, a, b: [B, T, H, K].
        v: [B, T, H, V].
        decay_form: The form of w: `log`, `raw` or `clamp`.
        scale: Factor of y.
        initial_state: [B, H, K, V] or None; copied if its dtype is not fp32 or its layout differs.
        return_final_state: Whether to return the final state.
        cu_seqlens: Bounds of packed sequences.
    Returns:
        y [B, T, H, V], and the final state [B, H, K, V] in fp32 or None.
    Raises:
        NotImplementedError: If the library has no such operator.
    """
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    made = _OPERATOR(
        r, w, k, v, a, b, initial_state, cu_seqlens=cu_seqlens, scale=scale,
        return_final_state=return_final_state, decay_form=decay_form,
    )
    return made if return_final_state else (made, None)
