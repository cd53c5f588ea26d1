"""linear_attention with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._library import passes_of, wants_gradient
from ._wkv import rows

_PASSES = passes_of("linear_attention")


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
    """Call the operator of the library, recorded for autograd.

    Args:
        q, k: [B, H, T, E].
        v: [B, H, T, M].
        scale: Factor of the products.
        eps: Added to the norm.
        initial_state: [B, H, E, M] in fp32, or None.
        initial_key_sum: [B, H, E] in fp32, or None.
        return_final_state: Whether the final state is wanted.
        return_final_key_sum: Whether the final sum of keys is wanted.
        normalize: Whether to divide by the norm.
    Returns:
        out [B, H, T, M]; the final state and sum of keys in fp32, each None if not wanted.
    Raises:
        NotImplementedError: If the library has no such operator.
    """
    tensors = (q, k, v, initial_state, initial_key_sum)
    if wants_gradient(*tensors):
        made = _Differentiable.apply(*tensors, scale, eps, return_final_state,  # type: ignore[no-untyped-call]
                                     return_final_key_sum, normalize)
    else:
        made = _forward(tensors, scale, eps, return_final_state, return_final_key_sum, normalize)
    found = iter((made,) if isinstance(made, Tensor) else made)
    out = next(found)
    return (out, next(found) if return_final_state else None,
            next(found) if return_final_key_sum else None)


def _forward(tensors: tuple[Tensor | None, ...], scale: float, eps: float, state: bool,
             key_sum: bool, norm: bool) -> Any:
    return _PASSES.forward(*tensors, scale=scale, eps=eps, return_final_state=state,
                           return_final_key_sum=key_sum, return_norm=norm)


class _Differentiable(torch.autograd.Function):
    """The operator's forward pass, with its own backward pass behind it."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial_state: Tensor | None,
        initial_key_sum: Tensor | None,
        scale: float,
        eps: float,
        return_final_state: bool,
        return_final_key_sum: bool,
        normalize: bool,
    ) -> Any:
        made = _forward((q, k, v, initial_state, initial_key_sum), scale, eps, return_final_state,
                        return_final_key_sum, normalize)
        saved = (made[0], made[-1]) if normalize else (None, None)
        ctx.save_for_backward(q, k, v, initial_state, initial_key_sum, *saved)
        ctx.called = scale, return_final_state, return_final_key_sum
        ctx.set_materialize_grads(False)
        if normalize:
            ctx.mark_non_differentiable(made[-1])
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gout: Tensor | None, *more: Tensor | None) -> Any:
        q, k, v, initial_state, initial_key_sum, out, norm = ctx.saved_tensors
        scale, has_state, has_key_sum = ctx.called
        ends = iter(more)
        gstate = next(ends) if has_state else None
        gkey_sum = next(ends) if has_key_sum else None
        gout = torch.zeros_like(v) if gout is None else rows(gout)
        gout_dot_out = None
        if norm is not None:  # what the norm's own gradient needs
            gout_dot_out = (gout.float() * out.float()).sum(-1).contiguous()
        found = iter(_PASSES.backward(
            gout, q, k, v, initial_state, initial_key_sum, norm, gout_dot_out,
            gfinal_state=None if gstate is None else gstate.contiguous(),
            gfinal_key_sum=None if gkey_sum is None else gkey_sum.contiguous(),
            scale=scale,
        ))
        gq, gk, gv = next(found), next(found), next(found)
        ginitial_state = None if initial_state is None else next(found)
        ginitial_key_sum = None if initial_key_sum is None else next(found)
        return (gq, gk, gv, ginitial_state, ginitial_key_sum, *[None] * 5)
