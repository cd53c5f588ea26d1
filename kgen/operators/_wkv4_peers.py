"""Peers of wkv4: PyTorch by blocks of steps, the same compiled, and FLA's kernel."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.operators._peer_calls import applied, differentiated
from kgen.operators._wkv4_definition import EMPTY

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Peer = Callable[[Tensors, Mapping[str, float]], object]
    # (k, v, log decay, u, initial state [B, C, 3] or None) -> (y, final state)
    Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]
    Block = Callable[..., tuple[torch.Tensor, ...]]

_FORWARD = ("k", "v", "w", "u", "initial_state")  # forward inputs, in the order of the gradients
_BLOCK = 32


def peers(pass_name: str) -> dict[str, Peer]:
    """Plain PyTorch, the same with its blocks compiled, and FLA's kernel where it is installed.

    Backward: the gradients of the same functions by autograd; the forward pass runs once per input
    set, outside of the timed part, which starts with the third call.
    """
    import torch

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    functions: dict[str, Function] = {
        "eager": _by_blocks(_block),
        "torch.compile": _by_blocks(torch.compile(_block, dynamic=False)),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("fla"):
        functions["fla_fused_recurrent"] = _fla
    if pass_name == "forward":
        return {name: applied(function, _arguments) for name, function in functions.items()}
    return {
        name: differentiated(function, _arguments, _FORWARD, ("gy", "gfinal_state"))
        for name, function in functions.items()
    }


def _by_blocks(block: Block) -> Function:
    """Softmax attention over a block's keys; all steps before the block count as one more key."""

    def call(
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        u: torch.Tensor,
        state: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        dtype = v.dtype
        decay, u, k, v = (x.float() for x in (decay, u, k, v))
        if state is None:
            mean = v.new_zeros(v.shape[0], v.shape[2])
            key = top = mean + EMPTY
        else:
            num, den, top = state.unbind(-1)
            there = den > 0
            mean = torch.where(there, num / torch.where(there, den, 1.0), 0.0)
            key = torch.where(there, top + torch.where(there, den, 1.0).log(), EMPTY)
        out = []
        for k_b, v_b in zip(torch.split(k, _BLOCK, 1), torch.split(v, _BLOCK, 1), strict=True):
            y, key, mean, top = block(decay.clamp_min(-1e4), u, k_b, v_b, key, mean, top)
            out.append(y)
        y = torch.cat(out, dim=1) if out else v
        den = (key - top).exp()
        return y.to(dtype), torch.stack([mean * den, den, top], dim=-1)

    return call


def _block(
    decay: torch.Tensor,
    u: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key: torch.Tensor,
    mean: torch.Tensor,
    top: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """(y, key and value of all steps so far, the largest exponent) of a block."""
    import torch

    steps = torch.arange(k.shape[1], device=k.device)
    apart = (steps[:, None] - 1 - steps)[..., None]  # number of decays between key s and output t
    past = k[:, None] + apart * decay
    now = (k + u)[:, None].expand(past.shape)
    scores = torch.where(apart >= 0, past, torch.where(apart == -1, now, float("-inf")))
    earlier = key[:, None] + steps[:, None] * decay
    weights = torch.cat([earlier[:, :, None], scores], dim=2).softmax(2)
    values = torch.cat([mean[:, None], v], dim=1)
    y = (weights * values[:, None]).sum(2)
    end = torch.cat([(key + len(steps) * decay)[:, None],
                     k + (len(steps) - 1 - steps)[:, None] * decay], dim=1)
    top = torch.maximum(top + len(steps) * decay, end[:, 1:].amax(1)).detach()
    return y, end.logsumexp(1), (end.softmax(1) * values).sum(1), top


def _fla(
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    u: torch.Tensor,
    state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch
    from fla.ops.rwkv4 import fused_recurrent_rwkv4

    if state is None:
        zero = k.new_zeros(k.shape[0], k.shape[2], dtype=torch.float32)
        state = torch.stack([zero, zero, zero + EMPTY], dim=-1)
    y, final = fused_recurrent_rwkv4((-decay).log(), u, k, v, state.mT.unsqueeze(2).contiguous())
    return y, final[:, :, 0].mT


def _arguments(
    inputs: Tensors, scalars: Mapping[str, float]
) -> tuple[torch.Tensor | None, ...]:
    """The arguments of a peer's function, which takes the log decay."""
    given = {name: inputs.get(name) for name in _FORWARD}
    if scalars.get("decay_form=raw"):
        given["w"] = -inputs["w"].exp()
    return tuple(given.values())
