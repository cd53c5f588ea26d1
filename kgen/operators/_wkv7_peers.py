"""Peers of wkv7: PyTorch in chunks, compiled, step by step, and FLA's kernels."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.operators._peer_calls import applied, differentiated
from kgen.operators._shared import in_chunks
from kgen.operators._wkv7_definition import CLAMP

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Peer = Callable[[Tensors, Mapping[str, float]], object]
    Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

_FORWARD = ("r", "w", "k", "v", "a", "b", "initial_state")
_CHUNK = 16
SLOW_PEERS = ("loop",)


def peers(pass_name: str) -> dict[str, Peer]:
    """Plain PyTorch, the same compiled, FLA's two kernels where they are installed, and forward the
    loop over steps.

    Backward: the gradients of the same functions by autograd; the forward pass runs once per input
    set, outside of the timed part, which starts with the third call.
    """
    import torch

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    functions: dict[str, Function] = {
        "eager": _by_chunks,
        "torch.compile": torch.compile(_by_chunks, dynamic=False),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("fla"):
        functions |= {
            "fla_chunk": _fla("chunk_rwkv7"),
            "fla_fused_recurrent": _fla("fused_recurrent_rwkv7"),
        }
    if pass_name == "forward":  # autograd would keep the states of all steps
        functions["loop"] = _by_steps
    if pass_name == "forward":
        return {name: applied(function, _arguments) for name, function in functions.items()}
    return {
        name: differentiated(function, _arguments, _FORWARD, ("gy", "gfinal_state"))
        for name, function in functions.items()
    }


def _of_sequences(compute: Function) -> Function:
    """Extend a function to packed sequences, which are computed one after the other."""

    def call(
        r: torch.Tensor,
        w: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor | None,
        scale: float,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        import torch

        rows = (r, w, k, v, a, b)
        if cu_seqlens is None:
            return compute(*rows, state, scale)
        made = [
            compute(*(x[:, first:last] for x in rows),
                    None if state is None else state[n : n + 1], scale)
            for n, (first, last) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        ends = [end for _, end in made if end is not None]
        return torch.cat([y for y, _ in made], dim=1), torch.cat(ends)

    return call


def _wide(*rows: torch.Tensor) -> list[torch.Tensor]:
    return [x.float().transpose(1, 2) for x in rows]


def _zero_or(
    state: torch.Tensor | None, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    return k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state


@_of_sequences
def _by_steps(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, state: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    dtype, out = v.dtype, []
    r, w, k, v, a, b = _wide(r, w, k, v, a, b)
    state, decay = _zero_or(state, k, v), w.exp()
    for t in range(v.shape[2]):
        sa = a[:, :, t, None] @ state
        state = decay[:, :, t, :, None] * state + b[:, :, t, :, None] * sa
        state = state + k[:, :, t, :, None] * v[:, :, t, None]
        out.append((r[:, :, t, None] @ state).squeeze(2) * scale)
    y = torch.stack(out, dim=2) if out else v
    return y.transpose(1, 2).to(dtype), state


@_of_sequences
def _by_chunks(
    r: torch.Tensor, w: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor, state: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute by chunks, each of which is an affine function of the state before it.

    Only one product per chunk runs in sequence; all else is computed for all chunks at once. No
    exponent is above 0.
    """
    import torch

    dtype = v.dtype
    r, w, k, v, a, b = _wide(r, w, k, v, a, b)
    state, steps = _zero_or(state, k, v), v.shape[2]
    r, w, k, v, a, b = (
        in_chunks(x, _CHUNK)
        for x in (r * scale, w.clamp_min(-100.0), k, v, a, b)  # clamped: -inf - (-inf) is NaN
    )
    after = w.cumsum(3)
    before = after - w
    order = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=v.device).tril()

    def pairs(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor, diagonal: int) -> torch.Tensor:
        apart = at[..., :, None, :] - after[..., None, :, :]
        decays = apart.masked_fill(~order.tril(diagonal)[..., None], float("-inf")).exp()
        return (x[..., :, None, :] * decays * y[..., None, :, :]).sum(-1)

    # sa = read_state S + read_values, for all steps of a chunk.
    inverse = torch.linalg.solve_triangular(
        -pairs(a, b, before, -1), torch.eye(_CHUNK, device=v.device).expand(*a.shape[:3], -1, -1),
        upper=False, unitriangular=True,
    )
    read_state = inverse @ (a * before.exp())
    read_values = inverse @ (pairs(a, k, before, -1) @ v)
    kept = after[..., -1:, :]
    decayed_k, decayed_b = ((x * (kept - after).exp()).transpose(-1, -2) for x in (k, b))
    transition = torch.diag_embed(kept.exp().squeeze(-2)) + decayed_b @ read_state
    added = decayed_k @ v + decayed_b @ read_values
    states = []
    for i in range(v.shape[2]):
        states.append(state)
        state = transition[:, :, i] @ state + added[:, :, i]
    if not states:
        return v.flatten(2, 3).transpose(1, 2).to(dtype), state
    starts = torch.stack(states, dim=2)
    sa = read_state @ starts + read_values
    y = pairs(r, k, after, 0) @ v + pairs(r, b, after, 0) @ sa + (r * after.exp()) @ starts
    return y.flatten(2, 3)[:, :, :steps].transpose(1, 2).to(dtype), state


def _fla(name: str) -> Function:
    """One of FLA's functions as a peer; it takes the same layout and the log decay."""

    def call(
        r: torch.Tensor,
        w: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        state: torch.Tensor | None,
        scale: float,
        cu_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        from fla.ops import rwkv7

        made: tuple[torch.Tensor, torch.Tensor | None] = getattr(rwkv7, name)(
            r, w, k, v, a, b, scale=scale, initial_state=state,
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
    elif scalars.get("decay_form=clamp"):
        given["w"] = -CLAMP * inputs["w"].sigmoid()
    return (*given.values(), scalars["scale"], inputs.get("cu_seqlens"))
