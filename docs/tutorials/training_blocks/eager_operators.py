"""The two operators as their definitions say, in plain PyTorch: what kgen_ops is compared with."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(
    x: Tensor, w: Tensor, residual: Tensor | None = None, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """Scale each row to unit root mean square.

    h = x + residual;  y = w * h / sqrt(mean(h^2) + eps), in fp32 inside

    Args:
        x: [..., N].
        w: [N].
        residual: Shape and dtype of x; None: h is x.
        eps: Added to the mean square.
    Returns:
        y; with a residual y and h.
    """
    h = x if residual is None else x + residual
    wide = h.float()
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * w.float()
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), h)


def wkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV-6 time mixing: a loop over the steps.

    y_t = r_t (S + diag(u) k_t v_t^T);  then S = diag(exp(w_t)) S + k_t v_t^T;  S begins as 0

    Args:
        r, k: [B, T, H, K].
        v: [B, T, H, V].
        w: [B, T, H, K]; the log decay, at most 0.
        u: [H, K]; the bonus of a step's own.
    Returns:
        [B, T, H, V]; dtype of v. The state is fp32.
    """
    wide_r, wide_k, wide_v = r.float(), k.float(), v.float()
    decay, bonus = w.float().exp()[..., None], u.float()[..., None]
    batch, steps, heads, features = k.shape
    state = wide_k.new_zeros(batch, heads, features, v.shape[-1])
    rows = []
    for t in range(steps):
        added = wide_k[:, t, :, :, None] * wide_v[:, t, :, None, :]
        rows.append((wide_r[:, t, :, :, None] * (state + bonus * added)).sum(-2))
        state = decay[:, t] * state + added
    return torch.stack(rows, 1).to(v.dtype)
