"""A causal linear-attention layer by `kgen_ops.linear_attention`."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from ..compat._library import operator_of
from ._extents import check_extents

_OPERATOR = operator_of("linear_attention")


class LinearAttentionState(NamedTuple):
    """The recurrent state that decoding continues from.

    Attributes:
        state: [B, H, E, E]; fp32; sum of phi(k) v^T.
        key_sum: [B, H, E]; fp32; sum of phi(k).
    """

    state: Tensor
    key_sum: Tensor


class LinearAttention(nn.Module):
    """Causal multi-head linear attention, with its projections.

    q, k, v = heads of q_proj(x), k_proj(x), v_proj(x);  phi(z) = elu(z) + 1
    out_t = sum over s <= t of a_ts v_s / (eps + sum over s <= t of a_ts)
    a_ts = phi(q_t) . phi(k_s)
    y = out_proj(out)

    It takes the place of a causal `torch.nn.MultiheadAttention(batch_first=True)` in a model. The
    weights of that module do not fit this one, because linear attention has no softmax.

    Args:
        embed_dim: Features of x and y; a multiple of num_heads.
        num_heads: H; a head has E = embed_dim / H features.
        bias: Whether the projections have a bias.
        eps: Added to the norm, the sum of a_ts.
        device, dtype: The device and dtype of the parameters.
    Raises:
        ValueError: If num_heads does not divide embed_dim.

    The projections start as `torch.nn.Linear` starts.
    Source: Katharopoulos et al. 2020, arXiv:2006.16236.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_extents("LinearAttention", embed_dim=embed_dim, num_heads=num_heads)
        if embed_dim % num_heads:
            raise ValueError(
                f"LinearAttention: num_heads = {num_heads} does not divide embed_dim = "
                f"{embed_dim}\n  allowed: divisors of embed_dim"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.eps = eps

        def projection() -> nn.Linear:
            return nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (projection() for _ in range(4))

    def reset_parameters(self) -> None:
        """Draw the projections anew."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            layer.reset_parameters()

    def forward(
        self, x: Tensor, state: LinearAttentionState | None = None, return_state: bool = False
    ) -> Tensor | tuple[Tensor, LinearAttentionState]:
        """Compute y, and the state after the last step if `return_state` is set.

        Args:
            x: [B, T, embed_dim]; while decoding T is 1.
            state: The state that an earlier call returned; None: the sequence begins.
            return_state: Whether to return the state as well.
        """
        try:
            q, k, v = (
                layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for layer in (self.q_proj, self.k_proj, self.v_proj)
            )
        except (IndexError, RuntimeError, TypeError) as problem:
            self._refuse(x, problem)
        before = (None, None) if state is None else tuple(state)
        if len(before) != 2:
            raise ValueError(f"LinearAttention: state has {len(before)} parts\n  next: pass the "
                             "LinearAttentionState that an earlier call returned")
        made = _OPERATOR(
            elu(q) + 1, elu(k) + 1, v, *before, eps=self.eps, return_norm=True,
            return_final_state=return_state, return_final_key_sum=return_state,
        )
        y: Tensor = self.out_proj(made[0].transpose(1, 2).flatten(2))
        return (y, LinearAttentionState(made[1], made[2])) if return_state else y

    def _refuse(self, x: object, problem: Exception) -> NoReturn:
        """Raise an error about an input that the projections do not take, or `problem` itself."""
        weight = self.q_proj.weight
        if isinstance(x, Tensor) and x.ndim == 3 and x.shape[-1] == self.embed_dim and (
                x.dtype == weight.dtype and x.device == weight.device
                and x.layout is torch.strided):
            raise problem
        shown = (f"{list(x.shape)} {x.dtype} {x.layout} on {x.device}" if isinstance(x, Tensor)
                 else type(x).__name__)
        raise ValueError(f"LinearAttention: x is {shown}\n  next: pass x [B, T, {self.embed_dim}], "
                         f"{weight.dtype} on {weight.device}, as the parameters") from problem

    def extra_repr(self) -> str:
        """The constructor's arguments."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, eps={self.eps:g}"
