"""The recurrence of RWKV-5 and RWKV-6 and its gradients, in plain torch.

Tensors are [B, H, T, features], the layout of batched matrix products.

Only S_t = diag(d_t) S_{t-1} + k_t v_t^T, and the same backward in time for the gradient of the
state, must be computed one step after the other: one torch op per step (`_accumulate`). All outer
products are computed before, and all products with the states after, for many steps at once,
because on a GPU even a tiny op takes some microseconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kgen.operators._shared import in_chunks

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Steps = tuple[torch.Tensor, ...]

_ROWS = ("r", "k", "v", "gy")
_MADE_ROWS = ("y", "gr", "gk", "gv")
_GIVEN_STATES = ("initial_state", "gfinal_state")
_MADE_STATES = ("final_state", "ginitial_state")
# Elements of states in memory at a time: for few launches on a GPU, for the caches on a CPU.
_STATE_ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 18}


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
    """(d, dd/dw) for w in the decay form that `scalars` gives."""
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
    """The definition with decays and their derivatives with respect to w, instead of w."""
    run = _packed if "cu_seqlens" in x else _of_rows
    found = run(pass_name, x, decay, scale)
    return {n: y.sum(0) if _is_of_heads(n, decay[0]) else y for n, y in found.items()}


def _is_of_heads(name: str, decay: torch.Tensor) -> bool:
    """Whether an output has neither batch nor steps: gu, and gw if w has no steps (wkv5)."""
    return name == "gu" or (name == "gw" and decay.ndim == 2)


def _packed(
    pass_name: str, x: Tensors, decay: tuple[torch.Tensor, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """`_of_rows` of packed sequences, with each sequence as a row.

    Sequences of similar length are computed together, padded to the longest of them, which is less
    than twice as long as any of them.
    """
    import torch

    cuts = x["cu_seqlens"].tolist()
    like: dict[int, list[int]] = {}
    for n, (first, last) in enumerate(itertools.pairwise(cuts)):
        like.setdefault((last - first).bit_length(), []).append(n)
    whole: dict[str, torch.Tensor] = {}
    for members in like.values():
        length = torch.tensor([cuts[n + 1] - cuts[n] for n in members])
        step = torch.arange(int(length.max()))
        inside = step < length[:, None]
        # After a sequence's end any step may be computed, because its results are dropped.
        index = (torch.tensor([cuts[n] for n in members])[:, None] + step).clamp_max(cuts[-1] - 1)
        taken = inside.flatten().nonzero()[:, 0]
        index, inside, taken, rows, place = (
            y.to(x["k"].device)
            for y in (index, inside, taken, index.flatten()[taken], torch.tensor(members))
        )
        its = {n: x[n][0][index] if n in _ROWS else y for n, y in x.items()}
        its |= {n: x[n][place] for n in _GIVEN_STATES if n in x}
        of_steps = decay if decay[0].ndim == 2 else (decay[0][0][index], decay[1][0][index])
        found = _of_rows(pass_name, its, of_steps, scale, inside)
        for name, y in found.items():
            if name in _MADE_STATES or _is_of_heads(name, decay[0]):
                whole.setdefault(name, y.new_empty(len(cuts) - 1, *y.shape[1:]))[place] = y
            else:
                made = whole.setdefault(name, y.new_empty(1, cuts[-1], *y.shape[2:]))
                made[0, rows] = y.flatten(0, 1)[taken]
    return whole


def _of_rows(
    pass_name: str,
    x: Tensors,
    decay: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    inside: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The recurrence of batch rows; gu, and gw if w has no steps, are not yet summed over rows.

    In fp32 the steps are computed one after the other, as in a kernel: the error bound of kernels
    comes from the rounding error of this loop. An element of a state is k_t v_t + d_t S_{t-1}:
    k_t v_t is rounded, then the sum (`addcmul`; if that is no fused multiply-add, d_t S_{t-1} as
    well). A product with a state is one sum over its keys or values. One op computes all outer
    products, or all products with states, of a block of steps; the roundings are the same.

    In float64 all chunks are computed in parallel, each from its own first state: no exponent is
    ever positive, so decays of 0 and 1 are exact.

    Args:
        pass_name: `forward` or `backward`.
        x: Rows [B, T, H, features], u and states.
        decay: As in `recurrence`.
        scale: The factor of y.
        inside: [B, T]: true for the steps of a row that exist, the first ones; None: all. Outputs
            of the other steps are undefined.
    """
    import torch

    steps = {n: x[n].transpose(1, 2) for n in _ROWS if n in x}
    per_step = decay[0].ndim == 4
    for name, by_key in zip(("decay", "slope"), decay, strict=True):
        steps[name] = (
            by_key.transpose(1, 2) if per_step else by_key[:, None].expand(steps["k"].shape)
        )
    if inside is not None:
        keeps = {"decay": 1.0}  # steps that do not exist leave the state unchanged
        there = inside[:, None, :, None]
        steps = {n: torch.where(there, y, keeps.get(n, 0.0)) for n, y in steps.items()}
    u = x["u"][:, None]
    if pass_name == "forward":
        found = _forward(steps, u, x.get("initial_state"), scale)
    else:
        found = _backward(steps, u, x.get("initial_state"), x.get("gfinal_state"), scale)
        if per_step:
            found["gu"] = _sum_of_steps(found["gu"])
        else:
            if inside is not None:  # masked, because 0 times a NaN state is NaN
                found["gw"] = torch.where(there, found["gw"], 0.0)
            both = _sum_of_steps(torch.cat([found["gu"], found["gw"]], dim=-1))
            found["gu"], found["gw"] = both.tensor_split(2, dim=-1)
    rows = (*_MADE_ROWS, "gw")
    return {n: y.transpose(1, 2) if n in rows and y.ndim == 4 else y for n, y in found.items()}


def _forward(
    x: Tensors, u: torch.Tensor, start: torch.Tensor | None, scale: float
) -> dict[str, torch.Tensor]:
    import torch

    r, k, v, decay = x["r"], x["k"], x["v"], x["decay"]
    state, steps = _state_or_zero(k, v, start), v.shape[2]
    if v.dtype == torch.float64 and steps > 1:
        r_c, k_c, v_c = (_in_chunks(y) for y in (r, k, v))
        decay_c = _in_chunks(decay, 1.0)  # a padding of 1 leaves the state unchanged
        starts = _starts(k_c, v_c, decay_c, state)
        groups = _groups((r_c, k_c, v_c, decay_c), starts[:, :, :-1])
        read = torch.cat([_loop(*group)[0] for group in groups]).view(v_c.shape)
        read, state = read.flatten(2, 3)[:, :, :steps], starts[:, :, -1]
    else:
        read, state = _loop(r, k, v, decay, state)
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
    """The gradients; those of w and u per step."""
    r, k, v, decay, g = x["r"], x["k"], x["v"], x["decay"], x["gy"] * scale
    state, gstate = _state_or_zero(k, v, start), _state_or_zero(k, v, end)
    if v.shape[2]:
        gr, gk, gv, by_decay, gstate = _gradients((r, k, v, decay, g), state, gstate)
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


def _loop(
    r: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(r_t S_{t-1} of every step, S_T) of S_t = diag(decay_t) S_{t-1} + k_t v_t^T."""
    import torch

    if v.shape[-2] == 0:
        return v, state
    read = []
    for r_b, k_b, v_b, decay_b in _blocks((r, k, v, decay), state):
        states = _states(k_b, v_b, decay_b, state)
        read.append((r_b.movedim(-2, 0)[..., None, :] @ states[:-1]).squeeze(-2))
        state = states[-1].clone()  # a view would keep the memory of all states
    return torch.cat(read).movedim(0, -2), state


def _blocks(x: Steps, state: torch.Tensor) -> Iterator[Steps]:
    """Blocks of as many steps as `_STATE_ELEMENTS` allows."""
    import torch

    steps = max(1, _max_elements(state) // max(state.numel(), 1))
    return zip(*(torch.split(part, steps, dim=-2) for part in x), strict=True)


def _groups(x: Steps, *states: torch.Tensor) -> Iterator[Steps]:
    """Groups of chunks [B, H, chunks, steps, features], flattened, with the states before them; as
    many chunks at a time as `_STATE_ELEMENTS` allows.
    """
    import torch

    of_a_chunk = x[0].shape[3] * states[0].shape[-1] * states[0].shape[-2]
    size = max(1, _max_elements(states[0]) // max(of_a_chunk, 1))
    flat = (torch.split(part.flatten(0, 2), size) for part in (*x, *states))
    return zip(*flat, strict=True)


def _max_elements(state: torch.Tensor) -> int:
    return _STATE_ELEMENTS["cpu" if state.device.type == "cpu" else "cuda"]


def _states(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The state before each step, and after the last: [steps + 1, ..., K, V]."""
    import torch

    made = state.new_empty(k.shape[-2] + 1, *state.shape)
    made[0] = state
    torch.mul(*_factors(k, v), out=made[1:])
    _accumulate(made[1:], decay, state)
    return made


def _last(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The state after the last step."""
    import torch

    for k_b, v_b, decay_b in _blocks((k, v, decay), state):
        state = _accumulate(torch.mul(*_factors(k_b, v_b)), decay_b, state)
    return state


def _factors(k: torch.Tensor, v: torch.Tensor) -> Steps:
    """The two factors of k_t v_t^T for all steps, with steps as the first dim."""
    return k.movedim(-2, 0)[..., None], v.movedim(-2, 0)[..., None, :]


def _accumulate(terms: torch.Tensor, decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Turn the terms k_t v_t^T, [steps, ..., K, V], into the states after each step; return the
    last one.
    """
    for made, d_t in zip(terms.unbind(0), decay[..., None].unbind(-3), strict=True):
        state = made.addcmul_(d_t, state)
    return state


def _gradients(
    x: Steps, state: torch.Tensor, gstate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(gr, gk, gv, gradient of the decay, gradient of the first state) without the bonus.

    Computed from the state before the first step and the gradient of the state after the last one.

    The gradient of the state follows the same recurrence as the state, from the last step to the
    first, with r and g in place of k and v. So one loop computes both: first the states at the ends
    of all chunks, then the states of all steps, for as many chunks at once as `_STATE_ELEMENTS`
    allows.
    """
    import torch

    steps = x[0].shape[2]
    pads = (0.0, 0.0, 0.0, 1.0, 0.0)  # a decay of 1 leaves the state unchanged
    chunks = [_in_chunks(part, pad) for part, pad in zip(x, pads, strict=True)]
    r, k, v, decay, g = chunks
    keys, values, kept = (
        torch.cat([a, b.flip(2, 3)]) for a, b in ((k, r), (v, g), (decay, decay))
    )
    starts, ends = _starts(keys, values, kept, torch.cat([state, gstate])).chunk(2)
    groups = _groups(tuple(chunks), starts[:, :, :-1], ends[:, :, :-1].flip(2))
    found = [_gradients_inside(group[:5], *group[5:]) for group in groups]
    whole = (
        torch.cat(parts, dim=1)
        .movedim(0, 1)
        .reshape(*r.shape[:4], parts[0].shape[-1])
        .flatten(2, 3)[:, :, :steps]
        for parts in zip(*found, strict=True)
    )
    return (*whole, ends[:, :, -1])


def _gradients_inside(
    x: Steps, state: torch.Tensor, gstate: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """(gr, gk, gv, gradient of the decay) of chunks [n, steps, features], with steps as the first
    dim.
    """
    import torch

    r, k, v, decay, g = x
    keys, values, kept = (torch.cat([a, b.flip(1)]) for a, b in ((k, r), (v, g), (decay, decay)))
    states = _states(keys, values, kept, torch.cat([state, gstate]))
    before, backwards = states[:-1].chunk(2, dim=1)
    gradients = backwards.flip(0)
    k, v, g = (part.movedim(1, 0) for part in (k, v, g))
    return (
        (before @ g[..., None]).squeeze(-1),
        (gradients @ v[..., None]).squeeze(-1),
        (k[..., None, :] @ gradients).squeeze(-2),
        (before * gradients).sum(-1),
    )


def _starts(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, start: torch.Tensor
) -> torch.Tensor:
    """States before every chunk, and after the last: [B, H, chunks + 1, K, V]."""
    import torch

    states = start.new_empty(*start.shape[:2], k.shape[2] + 1, *start.shape[2:])
    by_chunk = states.unbind(2)
    by_chunk[0].copy_(start)
    if start.dtype == torch.float64:
        zero = start.new_zeros(()).expand(*k.shape[:3], *start.shape[2:])
        inside = torch.cat([_last(*group) for group in _groups((k, v, decay), zero)])
        kept = decay.prod(3).flatten(0, 2)[..., None]
        by_itself = (x.view(*k.shape[:3], *x.shape[1:]).unbind(2) for x in (inside, kept))
        for i, (inside_c, kept_c) in enumerate(zip(*by_itself, strict=True)):
            torch.addcmul(inside_c, kept_c, by_chunk[i], out=by_chunk[i + 1])
    else:
        for i, chunk in enumerate(zip(k.unbind(2), v.unbind(2), decay.unbind(2), strict=True)):
            by_chunk[i + 1].copy_(_last(*chunk, by_chunk[i]))
    return states


def _in_chunks(x: torch.Tensor, pad: float = 0.0) -> torch.Tensor:
    """`in_chunks` with about as many chunks as steps per chunk, so that the sequential ops over
    chunks are about as many as those over the steps of all chunks.
    """
    return in_chunks(x, max(1, math.isqrt(x.shape[2] // 2)), pad)


def _sum_of_steps(x: torch.Tensor) -> torch.Tensor:
    """The sum over steps, [B, H, features]; fp32 adds one step after the other."""
    import torch

    if x.dtype == torch.float64 or x.shape[2] == 0:
        return x.sum(2)
    total = torch.zeros_like(x[:, :, 0])
    for x_t in x.unbind(2):
        total += x_t
    return total
