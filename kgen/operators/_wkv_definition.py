"""The recurrence of RWKV-5 and RWKV-6 and its gradients, in plain torch.

Here steps are the dim before the features, [B, H, T, features], as matrix products want them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Steps = tuple[torch.Tensor, ...]

# Steps that are taken one after the other, in all chunks at once; about the root of a usual T.
_CHUNK = 64
_GIVEN_STATES = ("initial_state", "gfinal_state")
_MADE_STATES = ("final_state", "ginitial_state")
# Elements of the states of all steps that a float64 gradient keeps at a time.
_KEPT = 1 << 26


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The recurrence of the operators' `doc`, in fp32 or wider; w is [B, T, H, K] or [H, K].

    `scalars` may say which form w has (`decay_form=raw`: 1); else it is the log decay.
    """
    import torch

    wide = {
        n: x.to(torch.promote_types(x.dtype, torch.float32)) if x.is_floating_point() else x
        for n, x in inputs.items()
    }
    found = recurrence(pass_name, wide, decays(wide["w"], scalars), scalars["scale"])
    like = {"y": "v", "gr": "r", "gk": "k", "gv": "v", "gw": "w", "gu": "u"}
    return {n: y.to(inputs[like[n]].dtype) if n in like else y for n, y in found.items()}


def decays(
    w: torch.Tensor, scalars: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d, dd/dw) of a w in the form that `scalars` says."""
    import torch

    if scalars.get("decay_form=raw"):
        decay = torch.exp(-w.exp())
        # Where the decay is 0, exp(w) may be infinite.
        return decay, torch.where(decay == 0, 0.0, -w.exp() * decay)
    if scalars.get("decay_form=decay"):
        return w, torch.ones_like(w)
    return w.exp(), w.exp()


def recurrence(
    pass_name: str, x: Tensors, decay: tuple[torch.Tensor, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """The definition on decays, and derivatives of them by w, instead of w. Sequences that are
    packed are taken one after the other.
    """
    import torch

    if "cu_seqlens" not in x:
        return _unpacked(pass_name, x, decay, scale)
    cuts = x["cu_seqlens"].tolist()
    rows = ("r", "k", "v", "gy")
    parts = []
    for n, (first, last) in enumerate(itertools.pairwise(cuts)):
        its = {name: y[:, first:last] if name in rows else y for name, y in x.items()}
        del its["cu_seqlens"]
        its |= {name: x[name][n : n + 1] for name in _GIVEN_STATES if name in x}
        of_steps = (decay[0], decay[1])
        if decay[0].ndim == 4:
            of_steps = (decay[0][:, first:last], decay[1][:, first:last])
        parts.append(_unpacked(pass_name, its, of_steps, scale))

    def joined(name: str) -> torch.Tensor:
        of_sequences = [part[name] for part in parts]
        if name in _MADE_STATES:
            return torch.cat(of_sequences)
        if of_sequences[0].ndim == 4:
            return torch.cat(of_sequences, dim=1)
        return torch.stack(of_sequences).sum(0)  # gu, and gw of w that has no steps

    return {name: joined(name) for name in parts[0]}


def _unpacked(
    pass_name: str, x: Tensors, decay: tuple[torch.Tensor, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """The recurrence of batch rows.

    fp32 takes one step after the other, as a kernel does: what that loses is what kernels are
    allowed. float64 takes the steps of all chunks side by side, each from its own start: no
    exponent is ever positive, so that it is exact for decays of 0 and of 1.
    """
    steps = {n: x[n].transpose(1, 2) for n in ("r", "k", "v", "gy") if n in x}
    per_step = decay[0].ndim == 4
    for name, by_key in zip(("decay", "slope"), decay, strict=True):
        steps[name] = (
            by_key.transpose(1, 2) if per_step else by_key[:, None].expand(steps["k"].shape)
        )
    u = x["u"][:, None]
    if pass_name == "forward":
        found = _forward(steps, u, x.get("initial_state"), scale)
    else:
        found = _backward(steps, u, x.get("initial_state"), x.get("gfinal_state"), scale)
        found["gu"] = _sum_of_steps(found["gu"]).sum(0)
        if not per_step:
            found["gw"] = _sum_of_steps(found["gw"]).sum(0)
    rows = ("y", "gr", "gk", "gv", "gw")
    return {n: y.transpose(1, 2) if n in rows and y.ndim == 4 else y for n, y in found.items()}


def _forward(
    x: Tensors, u: torch.Tensor, start: torch.Tensor | None, scale: float
) -> dict[str, torch.Tensor]:
    import torch

    r, k, v, decay = x["r"], x["k"], x["v"], x["decay"]
    state = _state_or_zero(k, v, start)
    if v.dtype == torch.float64 and v.shape[2] > _CHUNK:
        r_c, k_c, v_c = (_in_chunks(y) for y in (r, k, v))
        decay_c = _in_chunks(decay, 1.0)  # which keeps the state
        starts = _starts(k_c, v_c, decay_c, state)
        read, _ = _walk(r_c, k_c, v_c, decay_c, starts[:, :, :-1])
        read, state = read.flatten(2, 3)[:, :, : v.shape[2]], starts[:, :, -1]
    else:
        read, state = _walk(r, k, v, decay, state)
    return {
        "y": scale * (read + (r * u * k).sum(-1, keepdim=True) * v),
        "final_state": state,
    }


def _backward(
    x: Tensors,
    u: torch.Tensor,
    start: torch.Tensor | None,
    end: torch.Tensor | None,
    scale: float,
) -> dict[str, torch.Tensor]:
    """Gradients; those of w and u per step."""
    import torch

    r, k, v, decay, g = x["r"], x["k"], x["v"], x["decay"], x["gy"] * scale
    state, gstate = _state_or_zero(k, v, start), _state_or_zero(k, v, end)
    back = _back_by_chunks if v.dtype == torch.float64 else _back_one_by_one
    if v.shape[2]:
        gr, gk, gv, by_decay, gstate = back((r, k, v, decay, g), state, gstate)
    else:
        gr, gk, gv, by_decay = r, k, v, decay
    bonus = (v * g).sum(-1, keepdim=True)
    return {
        "gr": gr + u * k * bonus,
        "gk": gk + u * r * bonus,
        "gv": gv + (r * u * k).sum(-1, keepdim=True) * g,
        "gw": x["slope"] * by_decay,
        "gu": r * k * bonus,
        "ginitial_state": gstate,
    }


def _state_or_zero(
    k: torch.Tensor, v: torch.Tensor, given: torch.Tensor | None
) -> torch.Tensor:
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if given is None else given


def _walk(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(r_t S_{t-1} of every step, S_T) of S_t = diag(decay_t) S_{t-1} + k_t v_t^T."""
    import torch

    if v.shape[-2] == 0:
        return v, state
    read = []
    for r_t, k_t, v_t, d_t in zip(*(x.unbind(-2) for x in (r, k, v, decay)), strict=True):
        read.append((r_t[..., None, :] @ state).squeeze(-2))
        state = torch.addcmul(d_t[..., None] * state, k_t[..., None], v_t[..., None, :])
    return torch.stack(read, dim=-2), state


def _walk_back(
    x: Steps, state: torch.Tensor, gstate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(gr, gk, gv, gradient by the decay, gradient of the state before) without the bonus, from the
    state before the first step and the gradient of the one after the last. Keeps all steps' states.
    """
    import torch

    r, k, v, decay, g = x
    before, after = _states(k, v, decay, state)[0], []
    by_step = list(zip(*(part.unbind(-2) for part in (r, decay, g)), strict=True))
    for r_t, d_t, g_t in reversed(by_step):
        after.append(gstate)
        gstate = torch.addcmul(d_t[..., None] * gstate, r_t[..., None], g_t[..., None, :])
    gradients = torch.stack(after[::-1], dim=-3)
    return (
        (before @ g[..., None]).squeeze(-1),
        (gradients @ v[..., None]).squeeze(-1),
        (k[..., None, :] @ gradients).squeeze(-2),
        (before * gradients).sum(-1),
        gstate,
    )


def _states(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S_{t-1} of every step, S_T)."""
    import torch

    states = []
    for k_t, v_t, d_t in zip(*(x.unbind(-2) for x in (k, v, decay)), strict=True):
        states.append(state)
        state = torch.addcmul(d_t[..., None] * state, k_t[..., None], v_t[..., None, :])
    return torch.stack(states, dim=-3), state


def _back_one_by_one(
    x: Steps, state: torch.Tensor, gstate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`_walk_back`, from kept states of every 64th step."""
    import torch

    chunks = list(zip(*(torch.split(part, _CHUNK, dim=2) for part in x), strict=True))
    starts = [state]
    for _, k, v, decay, _ in chunks[:-1]:
        starts.append(_states(k, v, decay, starts[-1])[1])
    found = []
    for start, chunk in zip(reversed(starts), reversed(chunks), strict=True):
        *gradients, gstate = _walk_back(chunk, start, gstate)
        found.append(gradients)
    whole = (torch.cat(parts[::-1], dim=2) for parts in zip(*found, strict=True))
    return (*whole, gstate)


def _back_by_chunks(
    x: Steps, state: torch.Tensor, gstate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`_walk_back` of all chunks side by side, as many as `_KEPT` allows."""
    import torch

    steps = x[0].shape[2]
    pads = (0.0, 0.0, 0.0, 1.0, 0.0)  # a decay of 1 keeps the state
    chunks = [_in_chunks(part, pad) for part, pad in zip(x, pads, strict=True)]
    r, k, v, decay, g = chunks
    starts = _starts(k, v, decay, state)[:, :, :-1]
    ends = _starts(r.flip(2, 3), g.flip(2, 3), decay.flip(2, 3), gstate)
    flat = [part.flatten(0, 2) for part in (*chunks, starts, ends[:, :, :-1].flip(2))]
    size = max(1, _KEPT // (_CHUNK * starts.shape[-1] * starts.shape[-2]))
    found = []
    for i in range(0, max(flat[0].shape[0], 1), size):
        group = [part[i : i + size] for part in flat]
        found.append(_walk_back(tuple(group[:5]), group[5], group[6])[:4])
    whole = (
        torch.cat(parts).view(*r.shape[:4], parts[0].shape[-1]).flatten(2, 3)[:, :, :steps]
        for parts in zip(*found, strict=True)
    )
    return (*whole, ends[:, :, -1])


def _starts(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """States before every chunk, and after the last: [B, H, chunks + 1, K, V]."""
    import torch

    inside = torch.zeros_like(start)[:, :, None].expand(-1, -1, k.shape[2], -1, -1)
    for k_t, v_t, d_t in zip(*(x.unbind(3) for x in (k, v, decay)), strict=True):
        inside = torch.addcmul(d_t[..., None] * inside, k_t[..., None], v_t[..., None, :])
    kept = decay.prod(3)
    states = [start]
    for i in range(k.shape[2]):
        states.append(kept[:, :, i, :, None] * states[-1] + inside[:, :, i])
    return torch.stack(states, dim=2)


def _in_chunks(x: torch.Tensor, pad: float = 0.0) -> torch.Tensor:
    """[B, H, chunks, _CHUNK, features] of whole chunks."""
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    x = F.pad(x, (0, 0, 0, -x.shape[2] % _CHUNK), value=pad)
    return x.reshape(*x.shape[:2], x.shape[2] // _CHUNK, _CHUNK, x.shape[-1])


def _sum_of_steps(x: torch.Tensor) -> torch.Tensor:
    """[B, H, features], in fp32 one step after the other."""
    import torch

    if x.dtype == torch.float64 or x.shape[2] == 0:
        return x.sum(2)
    total = torch.zeros_like(x[:, :, 0])
    for x_t in x.unbind(2):
        total = total + x_t
    return total
