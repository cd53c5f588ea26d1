"""wkv5 and wkv6 as all adapters of RWKV call them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import operator_of, refuse

_OPERATORS = {name: operator_of(name) for name in ("wkv5", "wkv6")}


def wkv(
    operator: str,
    caller: str,
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
        caller: The published function that is stood in for; named in errors.
        r, k: [B, T, H, K].
        v: [B, T, H, V].
        w: [B, T, H, K], for wkv5 [H, K].
        u: [H, K].
        scale: Factor of y.
        initial_state: [B, H, K, V] or None; another dtype than fp32, or another layout, is copied.
        return_final_state: Whether the final state is wanted.
        cu_seqlens: Bounds of packed sequences.
        raw: Whether the decay is exp(-exp(w)); else it is exp(w).
    Returns:
        y [B, T, H, V], and the final state [B, H, K, V] in fp32 or None.
    Raises:
        NotImplementedError: If the library has no such operator, or none with packed sequences.
    """
    found = _OPERATORS[operator]
    if cu_seqlens is not None and found.takes and "cu_seqlens" not in found.takes:
        refuse(caller, "cu_seqlens", f"tensor of shape {tuple(cu_seqlens.shape)}", "None",
               f"{operator} of this library knows no packed sequences: call once per sequence")
    form = ""
    if raw and "decay_form" in found.takes:
        form = "raw"
    elif raw:
        w = log_decay(w)
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    made = found.function(
        r, k, v, w, u, initial_state, scale=scale, return_final_state=return_final_state,
        **_options(form, cu_seqlens),
    )
    return made if return_final_state else (made, None)


def log_decay(raw: Tensor) -> Tensor:
    """-exp(raw) in fp32: the decay is exp(-exp(raw)). For libraries whose kernels do not take raw
    decays: one more pass over w.
    """
    return -torch.exp(raw.float())


def _options(form: str, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """Arguments that not every library has; left out where they say nothing."""
    options: dict[str, Any] = {}
    if form:
        options["decay_form"] = form
    if cu_seqlens is not None:
        options["cu_seqlens"] = cu_seqlens
    return options


def heads(x: Tensor, count: int) -> Tensor:
    """[..., C] as a view [..., H, C / H]."""
    return x.view(*x.shape[:-1], count, x.shape[-1] // count)


def per_head(x: Tensor, count: int) -> Tensor:
    """[C] or [H, N], with any dims of extent 1, as a view [H, N]."""
    return x.reshape(count, x.numel() // count)
