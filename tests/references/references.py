"""Step-by-step operators in plain PyTorch, the references for results and gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def recurrence(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, u: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """wkv: y [B, T, H, V] and the last state [B, H, K, V]; decay [B, T, H, K]."""
    out = []
    for t in range(r.shape[1]):
        product = k[:, t, :, :, None] * v[:, t, :, None, :]
        out.append((r[:, t, :, :, None] * (state + u[..., None] * product)).sum(-2))
        state = decay[:, t, :, :, None] * state + product
    return torch.stack(out, 1), state


def wkv4(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """y [B, T, C] and the last state [B, C, 3]; w is the log decay. Maxima have no gradient."""
    if state is None:
        state = torch.tensor([0.0, 0.0, -1e38], dtype=k.dtype).expand(k.shape[0], k.shape[2], 3)
    num, den, top = state.unbind(-1)
    out = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        largest = torch.maximum(top, u + k_t).detach()
        old, new = (top - largest).exp(), (u + k_t - largest).exp()
        out.append((old * num + new * v_t) / (old * den + new))
        largest = torch.maximum(top + w, k_t).detach()
        old, new = (top + w - largest).exp(), (k_t - largest).exp()
        num, den, top = old * num + new * v_t, old * den + new, largest
    return torch.stack(out, 1), torch.stack([num, den, top], dim=-1)


def recurrence7(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, a: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """wkv7: y [B, T, H, V] and the last state [B, H, K, V]; decay [B, T, H, K]."""
    out = []
    for t in range(r.shape[1]):
        read = (a[:, t, :, :, None] * state).sum(-2, keepdim=True)
        state = (decay[:, t, :, :, None] * state + b[:, t, :, :, None] * read
                 + k[:, t, :, :, None] * v[:, t, :, None, :])
        out.append((r[:, t, :, :, None] * state).sum(-2))
    return torch.stack(out, 1), state


def attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, key_sum: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    """Linear attention, [B, T, H, features]; divided by the norm with a key sum [B, 1, H, E]."""
    out = []
    for t in range(q.shape[1]):
        state = state + k[:, t, :, :, None] * v[:, t, :, None, :]
        made = (q[:, t, :, :, None] * state).sum(-2) * scale
        if key_sum is not None:
            key_sum = key_sum + k[:, t, None]
            made = made / ((q[:, t] * key_sum[:, 0]).sum(-1, keepdim=True) * scale + 1e-10)
        out.append(made)
    found = torch.stack(out, 1)
    return (found, state) if key_sum is None else (found, state, key_sum)


def rmsnorm(x: Tensor, w: Tensor | None, residual: Tensor | None = None) -> tuple[Tensor, ...]:
    """y; with a residual also h."""
    h = x if residual is None else x + residual
    y = h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    y = y if w is None else y * w
    return (y,) if residual is None else (y, h)


def timex(w: Tensor, k: Tensor) -> tuple[Tensor]:
    """out[b, c, t] = sum over u <= t of w[c, T-1-(t-u)] * k[b, c, u]."""
    steps = k.shape[-1]
    return (torch.stack([
        (w[:, steps - 1 - t :] * k[..., : t + 1]).sum(-1) for t in range(steps)
    ], -1),)
