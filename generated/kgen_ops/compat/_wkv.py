"""wkv5 and wkv6 with gradients: what all adapters of RWKV call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._library import passes_of, refuse, wants_gradient

_PASSES = {name: passes_of(name) for name in ("wkv5", "wkv6")}


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
    """Call an operator of the library, recorded for autograd.

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
    passes = _PASSES[operator]
    if cu_seqlens is not None and passes.takes and "cu_seqlens" not in passes.takes:
        refuse(caller, "cu_seqlens", f"tensor of shape {tuple(cu_seqlens.shape)}", "None",
               f"{operator} of this library knows no packed sequences: call once per sequence")
    form = ""
    if raw and "decay_form" in passes.takes:
        form = "raw"
    elif raw:
        w = log_decay(w)
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    tensors = (r, k, v, w, u, initial_state)
    if wants_gradient(*tensors):
        made = _Differentiable.apply(operator, *tensors, cu_seqlens, scale, form,  # type: ignore[no-untyped-call]
                                     return_final_state)
    else:
        made = passes.forward(*tensors, scale=scale, return_final_state=return_final_state,
                              **_options(form, cu_seqlens))
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


class _Differentiable(torch.autograd.Function):
    """The operator's forward pass, with its own backward pass behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: str,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        u: Tensor,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        scale: float,
        form: str,
        return_final_state: bool,
    ) -> Any:
        ctx.save_for_backward(r, k, v, w, u, initial_state, cu_seqlens)
        ctx.called = operator, scale, form
        ctx.set_materialize_grads(False)  # no gradient of a state that nothing depends on
        return _PASSES[operator].forward(
            r, k, v, w, u, initial_state, scale=scale, return_final_state=return_final_state,
            **_options(form, cu_seqlens),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor | None, gfinal_state: Tensor | None = None) -> Any:
        r, k, v, w, u, initial_state, cu_seqlens = ctx.saved_tensors
        operator, scale, form = ctx.called
        gradients = _PASSES[operator].backward(
            torch.zeros_like(v) if gy is None else rows(gy), r, k, v, w, u,
            initial_state=initial_state,
            gfinal_state=None if gfinal_state is None else gfinal_state.contiguous(),
            scale=scale, **_options(form, cu_seqlens),
        )
        gstate = gradients[5] if initial_state is not None else None
        return (None, *gradients[:5], gstate, None, None, None, None)


def rows(gradient: Tensor) -> Tensor:
    """A gradient as kernels want it: autograd's may be an expanded number, with no rows at all."""
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def heads(x: Tensor, count: int) -> Tensor:
    """[..., C] as a view [..., H, C / H]."""
    return x.view(*x.shape[:-1], count, x.shape[-1] // count)


def per_head(x: Tensor, count: int) -> Tensor:
    """[C] or [H, N], with any dims of extent 1, as a view [H, N]."""
    return x.reshape(count, x.numel() // count)
