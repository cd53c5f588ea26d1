"""The definition of wkv7 and the scale of its errors, for sequences of many steps.

The formulas are those of `_wkv7_definition`, which runs all ops of each step in sequence, as suits
decoding. This module needs few torch ops per step (`_wkv7_scan`).

In fp32 the roundings are those of a kernel: a product with a state is one sum over its keys or
values, and a new state is the decayed one, plus k v^T, plus b sa^T, one step after the other. In
float64 nothing divides by a decay, and no exponent is positive, so decays of 0 and 1 are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kgen.operators._shared import root_sum_square_scale, widened
from kgen.operators._wkv7_definition import decays
from kgen.operators._wkv7_scan import (
    Part,
    Room,
    Rows,
    advance,
    block_steps,
    chunked,
    column,
    cut,
    groups,
    is_at_once,
    joined,
    read_keys,
    read_values,
    root_steps,
    row,
    starts,
    starts_in_turn,
)

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Made = dict[str, torch.Tensor]

_ROWS = ("r", "k", "v", "a", "b", "gy", "decay", "sa", "gsa")
_GIVEN_STATES = ("initial_state", "gfinal_state")
_MADE_STATES = ("final_state", "ginitial_state")
_LIKE = {"y": "v", "gr": "r", "gw": "w", "gk": "k", "gv": "v", "ga": "a", "gb": "b"}
# The error of exp (2 ulp) over the error that a result may have (5 ulp).
_EXP_SHARE = 0.4


def definition(pass_name: str, inputs: Tensors, scalars: Mapping[str, float]) -> Made:
    """The recurrence of the operator's `doc`, in fp32 or wider.

    `scalars` may say which form w has (`decay_form=raw`: 1); else it is the log decay.
    """
    x = {n: widened(y) if y.is_floating_point() else y for n, y in inputs.items()}
    decay, slope = decays(x["w"], scalars)
    found = recurrence(pass_name, x | {"decay": decay}, scalars["scale"])
    if "gdecay" in found:
        found["gw"] = slope * found.pop("gdecay")
    return {n: y.to(inputs[_LIKE[n]].dtype) if n in _LIKE else y for n, y in found.items()}


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> Made:
    """max(|y|, root of the sum of the terms' squares): the recurrence on squares.

    In the recurrence on squares, sa and gsa are given: the squares of their own magnitudes, not
    sums of squares over the squared states. A step replaces the value that is stored under a key,
    by cancellation; sums of squares, in which nothing cancels, would grow exponentially where
    nothing decays.

    With raw w, the decay is exp(-exp(w)): the error of its exponent grows with exp(w), and gw has
    the decay as a factor. In the other outputs, a term with such a strong decay is negligible
    beside terms that have not decayed.
    """
    decay, slope = decays(inputs["w"], scalars)
    x = {n: y for n, y in inputs.items() if n != "w"} | {"decay": decay}
    x |= recurrence(pass_name, x, scalars["scale"], magnitudes=True)
    squares = {n: y.square() if y.is_floating_point() else y for n, y in x.items()}
    squared = recurrence(pass_name, squares, scalars["scale"] ** 2)
    if "gdecay" in squared:
        squared["gw"] = slope.square() * squared["gdecay"]
    found = root_sum_square_scale(outputs, squared)
    if "gw" in found and scalars.get("decay_form=raw"):
        # Where exp(w) is infinite the decay is 0, and so is gw.
        found["gw"] = found["gw"] * (1 + _EXP_SHARE * inputs["w"].exp().clamp_max(1e3))
    return found


def recurrence(pass_name: str, x: Tensors, factor: float, magnitudes: bool = False) -> Made:
    """The definition with decays (`decay`) instead of w; their gradient is `gdecay`.

    If x has `sa` (and in the backward pass its gradient `gsa`), both [B, T, H, V], they replace the
    sums over keys: the states are then those of a linear attention with two keys per step.

    Args:
        pass_name: `forward` or `backward`.
        x: Inputs of the pass, `decay`, and optionally `sa` and `gsa`.
        factor: The factor of y.
        magnitudes: Return only max(|sa|, root of the sum of its terms' squares) as `sa`; likewise
            for `gsa`.
    """
    of_rows = _forward if pass_name == "forward" else _backward
    if "cu_seqlens" not in x:
        return of_rows(x, factor, magnitudes, None)
    return _packed(pass_name, x, factor, magnitudes)


def _packed(pass_name: str, x: Tensors, factor: float, magnitudes: bool) -> Made:
    """The recurrence of packed sequences, with each sequence as a row.

    Sequences of similar length are computed together, padded to the longest of them, which is less
    than twice as long as any of them.
    """
    import torch

    cuts = x["cu_seqlens"].tolist()
    like: dict[int, list[int]] = {}
    for n, (first, last) in enumerate(itertools.pairwise(cuts)):
        like.setdefault((last - first).bit_length(), []).append(n)
    whole: Made = {}
    for members in like.values():
        lengths = [cuts[n + 1] - cuts[n] for n in members]
        step = torch.arange(max(lengths))
        inside = (step < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0]
        # After a sequence's end any step may be computed, because its results are dropped.
        index = (torch.tensor([cuts[n] for n in members])[:, None] + step).clamp_max(cuts[-1] - 1)
        index, taken, rows, place = (
            y.to(x["k"].device)
            for y in (index, inside, index.flatten()[inside], torch.tensor(members))
        )
        its = {n: x[n][0][index] for n in _ROWS if n in x}
        its |= {n: x[n][place] for n in _GIVEN_STATES if n in x}
        of_rows = _forward if pass_name == "forward" else _backward
        for name, y in of_rows(its, factor, magnitudes, lengths).items():
            if name in _MADE_STATES:
                whole.setdefault(name, y.new_empty(len(cuts) - 1, *y.shape[1:]))[place] = y
            else:
                made = whole.setdefault(name, y.new_empty(1, cuts[-1], *y.shape[2:]))
                made[0, rows] = y.flatten(0, 1)[taken]
    return whole


def _steps_first(x: torch.Tensor) -> torch.Tensor:
    """Reshape [B, T, H, features] to [T, B * H, features]."""
    return x.transpose(0, 1).flatten(1, 2)


def _state(x: Tensors, name: str) -> torch.Tensor:
    """A state, [B, H, K, V]; 0 if it is not given."""
    if name in x:
        return x[name]
    k, v = x["k"], x["v"]
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])


def _outputs(parts: list[Made], chunks: int, x: Tensors) -> Made:
    """Join the parts of all groups, [L, some of C * n, features], to outputs [B, T, H, features].
    """
    import torch

    batch, total, heads = x["k"].shape[:3]
    found = {}
    for name in parts[0]:
        steps = joined(torch.cat([made[name] for made in parts], dim=1), chunks, total)
        found[name] = steps.view(total, batch, heads, -1).transpose(0, 1).contiguous()
    return found


def _magnitude(keys: torch.Tensor, states: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """max(|sa|, root of the sum of its terms' squares); the states are squared in place."""
    return read.abs().maximum(read_keys(keys.square(), states.square_()).sqrt())


def _forward(
    x: Tensors, factor: float, magnitudes: bool, lengths: Sequence[int] | None
) -> Made:
    import torch

    state = _state(x, "initial_state")
    if x["v"].numel() == 0:
        return {"sa": x["v"]} if magnitudes else {"y": x["v"], "final_state": state}
    r, decay, a, b, k, v = (_steps_first(x[n]) for n in ("r", "decay", "a", "b", "k", "v"))
    given = _steps_first(x["sa"]) if "sa" in x else None
    at_once = is_at_once(k, v) and k.dtype == torch.float64
    steps = root_steps(k) if at_once else block_steps(k, v)
    chunks = chunked(Rows(decay, a, b, k, v, given), steps, lengths)
    reads = cut(r, steps).flatten(1, 2)
    count, n = chunks.rows.k.shape[1:3]
    last, places = state.flatten(0, 1), [(c * n, (c + 1) * n) for c in range(count)]
    if at_once:
        begin = starts(chunks, last)
        places, last, begin = groups(chunks, v.shape[2], steps), begin[-1], begin[:-1].flatten(0, 1)
    # Two buffers, because the last state of a chunk is the first state of the next.
    rooms = [Room(last, steps, places[0][1]) for _ in range(1 if at_once else min(2, count))]
    parts = []
    for place, (i, j) in enumerate(places):
        part, states = chunks.part(i, j), rooms[place % len(rooms)].states(j - i)
        first = begin[i:j] if at_once else last
        sa = advance(part, first, states[1:].unbind(0))
        if not at_once:
            last = states[-1]
        if magnitudes:
            states[0] = first
            parts.append({"sa": _magnitude(part.rows.read, states[:-1], sa)})
        else:
            parts.append({"y": factor * read_keys(reads[:, i:j], states[1:])})
    found = _outputs(parts, count, x)
    return found if magnitudes else found | {"final_state": last.reshape(state.shape).clone()}


def _backward(
    x: Tensors, factor: float, magnitudes: bool, lengths: Sequence[int] | None
) -> Made:
    """Gradients.

    With G'_t = G_t + r_t g_t^T and gsa_t = b_t G'_t the gradient of the state is the recurrence

    G'_{t-1} = diag(d_t) G'_t + a_t gsa_t^T + r_{t-1} g_{t-1}^T

    and before the first step r and g are 0.
    """
    import torch

    if x["v"].numel() == 0:
        like = {"gr": "k", "gdecay": "k", "gk": "k", "gv": "v", "ga": "k", "gb": "k"}
        if magnitudes:
            return {"sa": x["v"], "gsa": x["v"]}
        return {n: x[of] for n, of in like.items()} | {"ginitial_state": _state(x, "gfinal_state")}
    x = {**x, "g": factor * x["gy"]}
    r, decay, a, b, k, v, g = (
        _steps_first(x[n]) for n in ("r", "decay", "a", "b", "k", "v", "g")
    )
    sa, gsa = (_steps_first(x[n]) if n in x else None for n in ("sa", "gsa"))
    at_once = is_at_once(k, v)
    steps = root_steps(k) if at_once else max(root_steps(k), block_steps(k, v))
    earlier_r, earlier_g = (torch.cat([torch.zeros_like(y[:1]), y[:-1]]) for y in (r, g))
    chunks = chunked(Rows(decay, a, b, k, v, sa), steps, lengths)
    # Chunks in the order of time; within each chunk, steps from the last to the first.
    gchunks = chunked(Rows(decay, b, a, earlier_r, earlier_g, gsa), steps, lengths).flipped(0)
    reads = cut(g, steps).flatten(1, 2)

    batch, total = x["k"].shape[:2]
    at_end = (torch.arange(batch), torch.tensor(lengths or [total] * batch) - 1)
    gfinal = _state(x, "gfinal_state").addcmul(column(x["r"][at_end]), row(x["g"][at_end]))
    begin, gstate = _state(x, "initial_state").flatten(0, 1), gfinal.flatten(0, 1)
    count, n = chunks.rows.k.shape[1:3]
    if at_once:
        both = starts(chunks.beside(gchunks.flipped(1)), torch.cat([begin, gstate]))
        begin, gbegin = both[:-1, :n], both[:-1, n:].flip(0).flatten(0, 1)
        gstate, places = both[-1, n:], groups(chunks, v.shape[2], steps)
    else:
        begin = starts_in_turn(chunks, begin, count - 1)
        places = [(c * n, (c + 1) * n) for c in range(count)]
    begin = begin.flatten(0, 1)
    widest = places[0][1]
    room, groom = Room(gstate, steps, widest), Room(gstate, steps, widest)
    parts = []
    for i, j in reversed(places):
        states, gstates = room.states(j - i), groom.states(j - i)
        states[0] = begin[i:j]
        gstates[steps] = gbegin[i:j] if at_once else gstate
        parts.append(
            _of_chunks(chunks.part(i, j), gchunks.part(i, j), states, gstates, reads[:, i:j],
                       magnitudes)
        )  # fmt: skip
        if not at_once:
            gstate = gstates[0].clone()  # the next chunk overwrites this memory
    found = _outputs(parts[::-1], count, x)
    return found if magnitudes else found | {"ginitial_state": gstate.reshape(gfinal.shape)}


def _of_chunks(
    part: Part, gpart: Part, states: torch.Tensor, gstates: torch.Tensor, g: torch.Tensor,
    magnitudes: bool,
) -> Made:  # fmt: skip
    """Gradients of some chunks.

    Args:
        part, gpart: Steps of the state, and those of its gradient, backward in time.
        states: [L + 1, rows, K, V], with the first one given; holds S_{t-1}, then is scratch.
        gstates: Likewise, with the last one given; holds G'_t after the first one, which stays.
        g: [L, rows, V].
        magnitudes: As in `recurrence`.
    """
    x = part.rows
    sa = advance(part, states[0], states[1:].unbind(0))
    gsa = advance(gpart, gstates[-1], gstates[:-1].unbind(0)[::-1]).flip(0)
    before, after, gradients = states[:-1], states[1:], gstates[1:]
    if magnitudes:
        return {"sa": _magnitude(x.read, before, sa), "gsa": _magnitude(x.write, gradients, gsa)}
    return {
        "gr": read_values(after, g),
        "gk": read_values(gradients, x.v),
        "gv": read_keys(x.k, gradients),
        "ga": read_values(before, gsa),
        "gb": read_values(gradients, sa),
        "gdecay": before.mul_(gradients).sum(-1),
    }
