"""Peers of linear_attention: chunks in PyTorch, the same compiled, FLA and fast-transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.operators._peer_calls import applied, differentiated

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Peer = Callable[[Tensors, Mapping[str, float]], object]

CHUNK = 64
_FORWARD = ("q", "k", "v", "initial_state", "initial_key_sum")


def peers(pass_name: str) -> dict[str, Peer]:
    """The peers: chunks of 64 steps in plain PyTorch, the same compiled, FLA and fast-transformers.

    The latter two are included if they are installed and support the problem: neither has the norm
    or the key sum, and fast-transformers has no states and only fp32.

    Backward: the gradients of the same functions by autograd; the forward pass runs once per
    input set, outside of what is timed, which starts with the third call.
    """
    import torch

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    functions: dict[str, Callable[..., object]] = {
        "eager": _chunked,
        "torch.compile": torch.compile(_chunked, dynamic=False),
    }
    on_gpu = torch.cuda.is_available()
    if on_gpu and importlib.util.find_spec("fla"):
        functions |= {
            "fla_chunk": _fla("chunk_linear_attn"),
            "fla_fused_chunk": _fla("fused_chunk_linear_attn"),
            "fla_fused_recurrent": _fla("fused_recurrent_linear_attn"),
        }
    if on_gpu and importlib.util.find_spec("fast_transformers"):
        functions["fast_transformers"] = _fast_transformers
    made = {name: _peer(function, pass_name) for name, function in functions.items()}
    return {n: _by_steps(peer) if n.startswith("fla_") else peer for n, peer in made.items()}


def _by_steps(peer: Peer) -> Peer:
    """Give a peer its rows in its own layout, [B, T, H, features], or it would copy them per call.

    They are copied once per input set, outside of the timed calls.
    """
    rows = ("q", "k", "v", "gout")
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def call(inputs: Tensors, scalars: Mapping[str, float]) -> object:
        key = inputs["q"].data_ptr()
        if key not in kept:
            kept[key] = {
                name: x.transpose(1, 2).contiguous().transpose(1, 2) if name in rows else x
                for name, x in inputs.items()
            }
        return peer(kept[key], scalars)

    return call


def _chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    keys: torch.Tensor | None,
    scale: float,
    eps: float,
    normalised: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunked algorithm; returns the output and the final state.

    Pairs of steps within a chunk are a masked matrix product; earlier chunks contribute through
    their states.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    b, h, steps, e = q.shape
    m = v.shape[-1]
    if normalised or keys is not None:  # the norm is the output of an additional column of ones
        v = torch.cat([v, v.new_ones(b, h, steps, 1)], dim=-1)
        if state is not None or keys is not None:
            given = state if state is not None else torch.zeros(b, h, e, m, device=q.device)
            sums = keys if keys is not None else torch.zeros(b, h, e, device=q.device)
            state = torch.cat([given, sums[..., None]], dim=-1)
    chunk = min(CHUNK, steps)
    pad = -steps % chunk
    qc, kc, vc = (
        F.pad(x, (0, 0, 0, pad)).reshape(b, h, -1, chunk, x.shape[-1])
        for x in (q, k, v)
    )
    products = (kc.transpose(-1, -2) @ vc).float().cumsum(2)
    before = F.pad(products[:, :, :-1], (0, 0, 0, 0, 1, 0))
    final = products[:, :, -1]
    if state is not None:
        before, final = before + state[:, :, None], final + state
    pairs = (qc @ kc.transpose(-1, -2)).tril()
    out = (qc @ before.to(q.dtype) + pairs @ vc).flatten(2, 3)[:, :, :steps] * scale
    if normalised:
        out = out[..., :m] / (out[..., m:] + eps)
    return out[..., :m], final[..., :m]


def _fla(name: str) -> Callable[..., object]:
    """One of FLA's functions as a peer; it takes [B, T, H, features] as a view."""

    def call(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: torch.Tensor | None,
        keys: torch.Tensor | None,
        scale: float,
        eps: float,
        normalised: bool,
    ) -> object:
        from fla.ops import linear_attn

        if normalised or keys is not None:
            raise NotImplementedError("FLA normalises outside of its kernels and has no key sum")
        out, final = getattr(linear_attn, name)(
            *(x.transpose(1, 2) for x in (q, k, v)),
            scale=scale,
            initial_state=state,
            output_final_state=state is not None,
            normalize=False,
        )
        return (out.transpose(1, 2), final) if final is not None else (out.transpose(1, 2),)

    return call


def _fast_transformers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    keys: torch.Tensor | None,
    scale: float,
    eps: float,
    normalised: bool,
) -> object:
    """fast-transformers' causal product, which takes [B, H, T, features] and has no scale.

    It launches on the legacy default stream, so a CUDA graph would be captured without its kernel,
    and its replays would time nothing.
    """
    import torch
    from fast_transformers.causal_product import causal_dot_product

    if normalised or keys is not None or state is not None or q.dtype != torch.float32:
        raise NotImplementedError("fast-transformers knows fp32 alone, no states and no norms")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("fast-transformers' kernels would not be in the graph")
    return (causal_dot_product(q if scale == 1.0 else q * scale, k, v),)


def _peer(function: Callable[..., object], pass_name: str) -> Peer:
    if pass_name == "forward":
        return applied(function, lambda inputs, scalars: _arguments(
            inputs, scalars, bool(scalars.get("return_norm"))))
    return differentiated(
        function, lambda inputs, scalars: _arguments(inputs, scalars, "norm" in inputs),
        _FORWARD, ("gout", "gfinal_state"))


def _arguments(
    inputs: Tensors, scalars: Mapping[str, float], normalised: bool
) -> tuple[object, ...]:
    return (
        *(inputs.get(name) for name in _FORWARD),
        scalars["scale"],
        scalars.get("eps", 0.0),
        normalised,
    )
