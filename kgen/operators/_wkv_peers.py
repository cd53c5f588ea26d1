"""Peers of wkv5 and wkv6: PyTorch step by step or in chunks, compiled, and FLA's kernels."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from kgen.operators._peer_calls import applied, differentiated

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Peer = Callable[[Tensors, Mapping[str, float]], object]
    Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_FORWARD = ("r", "k", "v", "w", "u", "initial_state")
_FEW = 16  # up to this many steps, no chunks are used
_CHUNK = 16
SLOW_PEERS = ("loop",)


def peers(pass_name: str) -> dict[str, Peer]:
    """Plain PyTorch, the same compiled, FLA's two kernels where they are installed, and forward the
    loop over steps that published profiles start from.

    FLA only has RWKV-6: the decay of RWKV-5 is expanded to all steps, outside of FLA's kernels but
    within the timed part. Backward: the gradients of the same functions by autograd; the
    forward pass runs once per input set, outside of the timed part, which starts with the third
    call.
    """
    import torch

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    functions: dict[str, Function] = {
        "eager": _plain,
        "torch.compile": torch.compile(_plain, dynamic=False),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("fla"):
        functions |= {
            "fla_chunk": _fla("chunk_rwkv6"),
            "fla_fused_recurrent": _fla("fused_recurrent_rwkv6"),
        }
    if pass_name == "forward":  # autograd would keep the states of all steps
        functions["loop"] = partial(_plain, few=sys.maxsize)
    if pass_name == "forward":
        return {name: applied(function, _arguments) for name, function in functions.items()}
    return {
        name: differentiated(function, _arguments, _FORWARD, ("gy", "gfinal_state"))
        for name, function in functions.items()
    }


def _plain(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    cu_seqlens: torch.Tensor | None = None,
    few: int = _FEW,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return y and the final state; packed sequences are computed one after the other."""
    dtype = v.dtype
    if cu_seqlens is not None:
        return _one_by_one(r, k, v, w, u, state, scale, cu_seqlens.tolist(), few)
    r, k, v, w = (x.float().transpose(1, 2) if x.ndim == 4 else x.float() for x in (r, k, v, w))
    if w.ndim == 2:
        w = w[:, None].expand(k.shape)
    if state is None:
        state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1])
    compute = _by_steps if v.shape[2] <= few else _by_chunks
    y, state = compute(r * scale, k, v, w, u.float()[:, None], state)
    return y.transpose(1, 2).to(dtype), state


def _one_by_one(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    cuts: list[int],
    few: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    made = []
    for n, (first, last) in enumerate(itertools.pairwise(cuts)):
        own_w = w if w.ndim == 2 else w[:, first:last]
        own_state = None if state is None else state[n : n + 1]
        own_r, own_k, own_v = (x[:, first:last] for x in (r, k, v))
        made.append(_plain(own_r, own_k, own_v, own_w, u, own_state, scale, None, few))
    return torch.cat([y for y, _ in made], dim=1), torch.cat([end for _, end in made])


def _by_steps(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    decay, bonus, out = w.exp(), u[:, 0, :, None], []
    for t in range(v.shape[2]):
        product = k[:, :, t, :, None] * v[:, :, t, None]
        out.append((r[:, :, t, None] @ (state + bonus * product)).squeeze(2))
        state = decay[:, :, t, :, None] * state + product
    return torch.stack(out, dim=2) if out else v, state


def _by_chunks(
    r: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute pairs of steps within a chunk directly, without an exponent above 0; earlier chunks
    contribute through the state.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    b, h, steps, _ = v.shape
    pad = -steps % _CHUNK
    r, k, v, w = (
        F.pad(x, (0, 0, 0, pad)).reshape(b, h, -1, _CHUNK, x.shape[-1]) for x in (r, k, v, w)
    )
    w = w.clamp_min(-100.0)  # -inf - (-inf) is NaN
    after = w.cumsum(3)
    before = after - w
    earlier = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=v.device).tril(-1)[..., None]
    apart = before[..., :, None, :] - after[..., None, :, :]
    decays = apart.masked_fill(~earlier, float("-inf")).exp()
    pairs = (r[..., :, None, :] * decays * k[..., None, :, :]).sum(-1)
    pairs = pairs + torch.diag_embed((r * u[:, None] * k).sum(-1))
    last = after[..., -1:, :]
    added = (k * (last - after).exp()).transpose(-1, -2) @ v
    kept = last.exp().transpose(-1, -2)
    states = []
    for i in range(v.shape[2]):
        states.append(state)
        state = kept[:, :, i] * state + added[:, :, i]
    y = pairs @ v + (r * before.exp()) @ torch.stack(states, dim=2)
    return y.flatten(2, 3)[:, :, :steps], state


def _fla(name: str) -> Function:
    """One of FLA's functions as a peer; it takes the same layout and the log decay."""

    def call(
        r: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        w: torch.Tensor,
        u: torch.Tensor,
        state: torch.Tensor | None,
        scale: float,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from fla.ops import rwkv6

        made: tuple[torch.Tensor, torch.Tensor | None] = getattr(rwkv6, name)(
            r,
            k,
            v,
            w.expand(k.shape) if w.ndim == 2 else w,
            u,
            scale=scale,
            initial_state=state,
            output_final_state=state is not None,
            **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}),
        )
        return made

    return call


def _arguments(inputs: Tensors, scalars: Mapping[str, float]) -> tuple[object, ...]:
    """The arguments of a peer's function, which takes the log decay; cu_seqlens come last."""
    given = {name: inputs.get(name) for name in _FORWARD}
    if scalars.get("decay_form=raw"):
        given["w"] = -inputs["w"].exp()
    elif scalars.get("decay_form=decay"):
        given["w"] = inputs["w"].log()
    return (*given.values(), scalars["scale"], inputs.get("cu_seqlens"))
