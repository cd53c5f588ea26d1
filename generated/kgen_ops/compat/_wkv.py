"""The call of wkv5 and wkv6 that all RWKV adapters share."""

from __future__ import annotations

from torch import Tensor

from ._library import operator_of

_OPERATORS = {name: operator_of(name) for name in ("wkv5", "wkv6")}


def wkv(
    operator: str,
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    raw: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Call an operator of the library.

    Args:
        operator: `wkv5` or `wkv6`.
        r, k: [B, T, H, K].
        v: [B, T, H, V].
        w: [B, T, H, K]; for wkv5 [H, K].
        u: [H, K].
        scale: Factor of y.
        initial_state: [B, H, K, V] or None; copied if its dtype is not fp32 or its layout differs.
        return_final_state: Whether to return the final state.
        cu_seqlens: Bounds of packed sequences.
        raw: Whether the decay is exp(-exp(w)); otherwise it is exp(w).
    Returns:
        y [B, T, H, V], and the final state [B, H, K, V] in fp32 or None.
    Raises:
        NotImplementedError: If the library has no such operator.
    """
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    made = _OPERATORS[operator](
        r, k, v, w, u, initial_state, cu_seqlens=cu_seqlens, scale=scale,
        return_final_state=return_final_state, decay_form="raw" if raw else "log",
    )
    return made if return_final_state else (made, None)


def heads(x: Tensor, count: int) -> Tensor:
    """[..., C] as a view [..., H, C / H]."""
    return x.view(*x.shape[:-1], count, x.shape[-1] // count)


def per_head(x: Tensor, count: int) -> Tensor:
    """[C] or [H, N], with any dims of extent 1, as a view [H, N]."""
    return x.reshape(count, x.numel() // count)
