"""The call of linear_attention that its adapters share."""

from __future__ import annotations

from torch import Tensor

from ._library import operator_of

_OPERATOR = operator_of("linear_attention")


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    eps: float,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    return_final_state: bool,
    return_final_key_sum: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Call the operator of the library.

    Args:
        q, k: [B, H, T, E].
        v: [B, H, T, M].
        scale: Factor of the products.
        eps: Added to the norm.
        initial_state: [B, H, E, M] in fp32, or None.
        initial_key_sum: [B, H, E] in fp32, or None.
        return_final_state: Whether to return the final state.
        return_final_key_sum: Whether to return the final sum of keys.
        normalize: Whether to divide by the norm.
    Returns:
        out [B, H, T, M]; the final state and sum of keys in fp32, each None if not requested.
    Raises:
        NotImplementedError: If the library has no such operator.
    """
    made = _OPERATOR(
        q, k, v, initial_state, initial_key_sum, scale=scale, eps=eps,
        return_final_state=return_final_state, return_final_key_sum=return_final_key_sum,
        return_norm=normalize,
    )
    found = iter((made,) if isinstance(made, Tensor) else made)
    out = next(found)
    return (out, next(found) if return_final_state else None,
            next(found) if return_final_key_sum else None)
