"""The definition of wkv7 and the scale of its errors, for sequences of many steps.

The formulas are those of `_wkv7_definition`, which has one op after the other for every step, as
decoding wants; here they need few ops per step (`_wkv7_scan`).

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
    Rows,
    advance,
    block_steps,
    chunk_steps,
    chunked,
    column,
    cut,
    groups,
    joined,
    read_keys,
    read_values,
    row,
    starts,
)

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Made = dict[str, torch.Tensor]

_ROWS = ("r", "k", "v", "a", "b", "gy", "decay", "sa", "gsa")
_GIVEN_STATES = ("initial_state", "gfinal_state")
_MADE_STATES = ("final_state", "ginitial_state")
_LIKE = {"y": "v", "gr": "r", "gw": "w", "gk": "k", "gv": "v", "ga": "a", "gb": "b"}
# Share of exp (2 ulp) in the error that a result may have (5 ulp).
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

    sa and gsa there are of the terms that they have, not of sums of squares in turn. A step
    replaces what is stored under a key by a cancellation, and sums of squares, which lack it, would
    grow exponentially where nothing decays.

    Raw w: the exponent exp(w) has an error that grows with it, and gw has the decay as a factor.
    In the other outputs a decay that strong is negligible beside terms that have not decayed.
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
    """The definition on decays (`decay`) instead of w; the gradient by them is `gdecay`.

    If x has `sa` (and in the backward pass its gradient `gsa`), both [B, T, H, V], they take the
    place of the sums over keys: the states are then those of a linear attention with two keys per
    step.

    Args:
        pass_name: `forward` or `backward`.
        x: Inputs of the pass, `decay`, perhaps `sa` and `gsa`.
        factor: The factor of y.
        magnitudes: Return nothing but max(|sa|, root of the sum of its terms' squares) as `sa`;
            so `gsa`.
    """
    of_rows = _forward if pass_name == "forward" else _backward
    if "cu_seqlens" not in x:
        return of_rows(x, factor, magnitudes, None)
    return _packed(pass_name, x, factor, magnitudes)


def _packed(pass_name: str, x: Tensors, factor: float, magnitudes: bool) -> Made:
    """Packed sequences, each of which is a row.

    Those of like length go side by side, padded to the longest of them: less than twice their own.
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
        # Behind a sequence's end any step will do: nothing of it stays.
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
    """[B, T, H, features] as [T, B * H, features]."""
    return x.transpose(0, 1).flatten(1, 2)


def _state(x: Tensors, name: str) -> torch.Tensor:
    """A state, [B, H, K, V]; 0 unless given."""
    if name in x:
        return x[name]
    k, v = x["k"], x["v"]
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])


def _outputs(parts: list[Made], chunks: int, x: Tensors) -> Made:
    """Per output the parts of all groups, [L, some of C * n, features], as [B, T, H, features]."""
    import torch

    batch, total, heads = x["k"].shape[:3]
    found = {}
    for name in parts[0]:
        steps = joined(torch.cat([made[name] for made in parts], dim=1), chunks, total)
        found[name] = steps.view(total, batch, heads, -1).transpose(0, 1).contiguous()
    return found


def _magnitude(keys: torch.Tensor, states: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """max(|sa|, root of the sum of its terms' squares); the states are then their squares."""
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
    is_exact = k.dtype == torch.float64
    steps = chunk_steps(k) if is_exact else block_steps(k, v)
    rows = chunked(Rows(decay, a, b, k, v, given), steps, lengths)
    reads = cut(r, steps).flatten(1, 2)
    count, n = rows.rows.k.shape[1:3]
    last = state.flatten(0, 1)
    if is_exact:
        begin = starts(rows, last)
        places, last = groups(rows, v.shape[2], steps), begin[-1]
        begin = begin[:-1].flatten(0, 1)
    else:
        places = ((c * n, (c + 1) * n) for c in range(count))
    parts = []
    for i, j in places:
        part = rows.part(i, j)
        states = last.new_empty(steps + 1, j - i, *last.shape[1:])
        states[0] = begin[i:j] if is_exact else last
        sa = advance(part, states[0], states[1:].unbind(0))
        if not is_exact:
            last = states[-1].clone()  # a view would keep all of them
        if magnitudes:
            parts.append({"sa": _magnitude(part.rows.read, states[:-1], sa)})
        else:
            parts.append({"y": factor * read_keys(reads[:, i:j], states[1:])})
    found = _outputs(parts, count, x)
    return found if magnitudes else found | {"final_state": last.view(state.shape)}


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
    given, given_gsa = (_steps_first(x[n]) if n in x else None for n in ("sa", "gsa"))
    steps = chunk_steps(k)
    rows = chunked(Rows(decay, a, b, k, v, given), steps, lengths)
    earlier_r, earlier_g = (torch.cat([torch.zeros_like(y[:1]), y[:-1]]) for y in (r, g))
    by_time = chunked(Rows(decay, b, a, earlier_r, earlier_g, given_gsa), steps, lengths)
    reads = cut(g, steps).flatten(1, 2)

    batch, total = x["k"].shape[:2]
    at_end = (torch.arange(batch), torch.tensor(lengths or [total] * batch) - 1)
    gstate = _state(x, "gfinal_state").addcmul(column(x["r"][at_end]), row(x["g"][at_end]))
    both = torch.cat([_state(x, "initial_state").flatten(0, 1), gstate.flatten(0, 1)])
    begin, end = starts(rows.beside(by_time.flipped(0, 1)), both).chunk(2, dim=1)
    begin, gbegin = begin[:-1].flatten(0, 1), end[:-1].flip(0).flatten(0, 1)
    backwards = by_time.flipped(0)

    parts = []
    for i, j in groups(rows, v.shape[2], steps):
        part, gpart = rows.part(i, j), backwards.part(i, j)
        states = begin.new_empty(steps + 1, j - i, *begin.shape[1:])
        states[0] = begin[i:j]
        sa = advance(part, states[0], states[1:].unbind(0))
        gstates = torch.empty_like(states)
        gstates[steps] = gbegin[i:j]
        gsa = advance(gpart, gstates[steps], gstates[:-1].unbind(0)[::-1]).flip(0)
        old, new, later = states[:-1], states[1:], gstates[1:]
        if magnitudes:
            made = {
                "sa": _magnitude(part.rows.read, old, sa),
                "gsa": _magnitude(part.rows.write, later, gsa),
            }
        else:
            made = {
                "gr": read_values(new, reads[:, i:j]),
                "gk": read_values(later, part.rows.v),
                "gv": read_keys(part.rows.k, later),
                "ga": read_values(old, gsa),
                "gb": read_values(later, sa),
                "gdecay": (old * later).sum(-1),
            }
        parts.append(made)
    found = _outputs(parts, rows.rows.k.shape[1], x)
    return found if magnitudes else found | {"ginitial_state": end[-1].reshape(gstate.shape)}
