"""Time mixing of RWKV-7 by `kgen_ops.wkv7`, with the parameters around the recurrence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..compat._library import operator_of
from ..compat._wkv import heads
from ._extents import check_extents, refuse_rows
from .wkv import depth_of, ramp

_WKV7 = operator_of("wkv7")


class Wkv7(nn.Module):
    """RWKV-7: the part of a time-mixing layer between its projections and its gate.

    kk_t = (k_t k_k) / |k_t k_k|,  k'_t = k_t (1 + (a_t - 1) k_a)
    S_t = diag(d_t) S_{t-1} - (kk_t a_t) (kk_t S_{t-1})^T + k'_t v_t^T
    d_t = exp(-exp(-0.5) sigmoid(w_t))
    y_t = ln_x(r_t S_t) + (sum over the head's features of r_t k'_t r_k) v_t

    Parameters, named as in RWKV-LM: k_k, k_a [H K], r_k [H, K], and the group norm ln_x over
    heads. The recurrence itself has no parameters: w and a come from the model.

    Args:
        num_heads: H.
        head_size: K, the features of a head of each input.
        layer, layers: Place of the layer in the model, from 0, and number of layers. They choose
            the initial values alone.
        device, dtype: The device and dtype of the parameters.
        eps: Added to the variance in the group norm. RWKV-LM has 64e-5 for every head size; FLA's
            layer has 1e-5 K, which is the same value for K = 64.

    Initial values, with c over all C = H K channels: k_k = 0.71 - 0.1 (c / (C-1) - 0.5);
    k_a = 1.02; r_k = -0.04; ln_x.weight = ((layer + 1) / layers)^0.7; ln_x.bias = 0.
    Source: Peng et al. 2025, arXiv:2503.14456; initial values and eps: `RWKV_Tmix_x070` and
    `generate_init_weight` of RWKV-LM's RWKV-v7/train_temp/src/model.py.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        layer: int = 0,
        layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 64e-5,
    ) -> None:
        super().__init__()
        check_extents("Wkv7", num_heads=num_heads, head_size=head_size)
        depth_of("Wkv7", layer, layers)
        self.num_heads = num_heads
        self.head_size = head_size
        self._share = (layer + 1) / layers
        channels = num_heads * head_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.k_k, self.k_a = parameter(channels), parameter(channels)
        self.r_k = parameter(num_heads, head_size)
        self.ln_x = nn.GroupNorm(num_heads, channels, eps=eps, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values."""
        self.ln_x.reset_parameters()
        with torch.no_grad():
            self.k_k.copy_(0.71 - 0.1 * (ramp(self.k_k.numel()) - 0.5))
            self.k_a.fill_(1.02)
            self.r_k.fill_(-0.04)
            self.ln_x.weight.fill_(self._share**0.7)

    def forward(
        self,
        r: Tensor,
        w: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        state: Tensor | None = None,
        return_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute y [B, T, C], and the state after the last step if `return_state` is set.

        Args:
            r, k, v: [B, T, C].
            w: [B, T, C]; the decay before its sigmoid.
            a: [B, T, C]; the share of a key's value in the state that is replaced, from 0 to 1.
            state: [B, H, K, K] in fp32, returned by an earlier call; None: the sequence begins.
            return_state: Whether to return the state as well.
            cu_seqlens: [N + 1]; bounds of sequences packed into T. B is then 1, and states are
                [N, H, K, K].
        """
        count = self.num_heads
        rows = r, w, k, v, a
        try:
            kk = normalize(heads(k * self.k_k, count), dim=-1)
            k = k * (1 + (a - 1) * self.k_a)
            r, w, k, v, a = (heads(x, count) for x in (r, w, k, v, a))
        except (AttributeError, IndexError, RuntimeError, TypeError) as problem:
            refuse_rows("Wkv7", count, dict(zip("rwkva", rows, strict=True)), problem)
        made = _WKV7(
            r, w, k, v, -kk, kk * a, state, cu_seqlens, return_final_state=return_state,
            decay_form="clamp",
        )
        y = made[0] if return_state else made
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        y = self.ln_x(y.flatten(0, 1).flatten(1)).view(*y.shape[:2], -1) + bonus.flatten(2)
        return (y, made[1]) if return_state else y

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"num_heads={self.num_heads}, head_size={self.head_size}"
