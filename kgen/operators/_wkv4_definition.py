"""wkv4: the recurrence, its gradients, and the scales that errors are relative to.

A pair (exponent, a, b) stands for the two numbers a e^exponent and b e^exponent. The numerator and
the denominator of y are such a pair, and so are their gradients, which are accumulated backward in
time. The exponent is the largest exponent of the terms, so no exponential overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kgen.operators._shared import widened

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Exponent of an empty sum, as in the published state before the first step. Not -inf, because
# -inf - (-inf) is NaN.
EMPTY = -1e38
# Step of the difference quotient by the decay: T times the step is small.
_SHIFT = 1e-5


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The recurrence of the operator's `doc`, in fp32 or wider, one step after the other.

    `scalars` may say which form w has (`decay_form=raw`: 1); else it is the log decay.
    """
    wide = {name: widened(x) for name, x in inputs.items()}
    decay, slope = log_decay(wide["w"], scalars)
    if pass_name == "forward":
        found = _forward(wide, decay)
    else:
        found = _backward(wide, decay)
        found["gw"] = slope * found["gw"]
    like = {"y": "v", "gk": "k", "gv": "v", "gw": "w", "gu": "u"}
    return {n: y.to(inputs[like[n]].dtype) if n in like else y for n, y in found.items()}


def log_decay(
    w: torch.Tensor, scalars: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the log decay, its derivative with respect to w)."""
    import torch

    if not scalars.get("decay_form=raw"):
        return w, torch.ones_like(w)
    decay = -w.exp()
    # The derivative is 0 where the decay is 0.
    return decay, torch.where(decay.isinf(), 0.0, decay)


def added(
    pair: Pair, decay: torch.Tensor | float, exponent: torch.Tensor, a: torch.Tensor,
    b: torch.Tensor,
) -> Pair:  # fmt: skip
    """pair * e^decay + (a, b) * e^exponent. NaN reaches a and b, never the exponent."""
    import torch

    kept = pair[0] + decay
    shift = exponent - kept
    old, new = torch.exp(-shift.clamp_min(0.0)), torch.exp(shift.clamp_max(0.0))
    return torch.fmax(kept, exponent), old * pair[1] + new * a, old * pair[2] + new * b


def _states(k: torch.Tensor, v: torch.Tensor, ones: torch.Tensor, decay: torch.Tensor,
            start: Pair) -> Pair:  # fmt: skip
    """The state before each step and after the last one, [B, T + 1, C] each.

    fp32 computes one step after the other, as the published kernels do. float64, whose rounding
    errors do not matter, uses doubling, which needs fewer launches: a GPU takes a few launches per
    step, or per doubling.
    """
    import torch

    if k.dtype == torch.float64:
        return _states_by_doubling((k, v, ones), decay, start)
    states = [start]
    for k_t, v_t, one in zip(k.unbind(1), v.unbind(1), ones.unbind(1), strict=True):
        states.append(added(states[-1], decay, k_t, v_t, one))
    exponents, a, b = (torch.stack(part, dim=1) for part in zip(*states, strict=True))
    return exponents, a, b


def _states_by_doubling(terms: Pair, decay: torch.Tensor, start: Pair) -> Pair:
    """As `_states`, from sums of the last 1, 2, 4, ... terms at each step; sums are associative."""
    import torch

    found = [
        torch.cat([first[:, None], rest], 1) for first, rest in zip(start, terms, strict=True)]
    distance, count = 1, found[0].shape[1]
    while distance < count:
        before, after = ([x[:, span] for x in found]
                         for span in (slice(None, -distance), slice(distance, None)))
        exponent, a, b = before
        both = added((exponent, a, b), distance * decay, *after)
        found = [torch.cat([x[:, :distance], more], 1)
                 for x, more in zip(found, both, strict=True)]
        distance *= 2
    exponents, a, b = found
    return exponents, a, b


def _before(states: Pair) -> Pair:
    """The states before all steps."""
    exponent, a, b = states
    return exponent[:, :-1], a[:, :-1], b[:, :-1]


def _after(states: Pair) -> Pair:
    """The states after all steps."""
    exponent, a, b = states
    return exponent[:, 1:], a[:, 1:], b[:, 1:]


def _at(states: Pair, place: int) -> Pair:
    """One of the states; 0 is before the first step."""
    exponent, a, b = states
    return exponent[:, place], a[:, place], b[:, place]


def _given(x: Tensors) -> Pair:
    """The given state before the first step."""
    if "initial_state" in x:
        num, den, exponent = x["initial_state"].unbind(-1)
        return exponent, num, den
    zero = x["k"].new_zeros(x["k"].shape[0], x["k"].shape[2])
    return zero + EMPTY, zero, zero


def _forward(x: Tensors, decay: torch.Tensor) -> dict[str, torch.Tensor]:
    import torch

    k, v, one = x["k"], x["v"], torch.ones_like(x["v"])
    start = _given(x)
    states = _states(k, v, one, decay, start)
    _, a, b = added(_before(states), 0.0, x["u"] + k, v, one)
    exponent, num, den = _at(states, -1)
    # A NaN key does not change the stored max, but a NaN max of the initial state remains.
    exponent = torch.where(start[0].isnan(), start[0], exponent)
    return {"y": a / b, "final_state": torch.stack([num, den, exponent], dim=-1)}


def _backward(x: Tensors, decay: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients; gw is the gradient with respect to the log decay."""
    import torch

    k, v, one = x["k"], x["v"], torch.ones_like(x["v"])
    states = _states(k, v, one, decay, _given(x))
    before = _before(states)
    exponent, a, b = added(before, 0.0, x["u"] + k, v, one)
    y, r = a / b, x["gy"] / b
    end = _end(x, _at(states, -1), 1)
    adjoint = _adjoint(exponent, r, -r * y, decay, end)
    n, ga, gd = _after(adjoint)
    own, later = (x["u"] + k - exponent).exp(), (k + n).exp()
    gu = own * r * (v - y)
    gw = (decay + before[0] + n).exp() * (before[1] * ga + before[2] * gd)
    return {
        "gk": gu + later * (v * ga + gd),
        "gv": own * r + later * ga,
        "gw": _sum_of_steps(gw).sum(0),
        "gu": _sum_of_steps(gu).sum(0),
        "ginitial_state": _by_state(_at(states, 0), _at(adjoint, 0)),
    }


def _end(x: Tensors, last: Pair, power: int) -> Pair:
    """The gradient with respect to numerator and denominator after the last step."""
    if "gfinal_state" in x:
        gnum, gden, _ = x["gfinal_state"].unbind(-1)
        return -last[0], gnum**power, gden**power
    zero = last[0].new_zeros(last[0].shape)
    return zero + EMPTY, zero, zero


def _adjoint(exponent: torch.Tensor, a: torch.Tensor, b: torch.Tensor, decay: torch.Tensor,
             end: Pair) -> Pair:  # fmt: skip
    """The gradients with respect to numerator and denominator, before the first step and then
    after each step.
    """
    n, ga, gd = _states(-exponent.flip(1), a.flip(1), b.flip(1), decay, end)
    return n.flip(1), ga.flip(1), gd.flip(1)


def _by_state(start: Pair, adjoint: Pair) -> torch.Tensor:
    """The gradient with respect to the stored state (num, den, max)."""
    import torch

    factor = (start[0] + adjoint[0]).exp()
    gnum, gden = factor * adjoint[1], factor * adjoint[2]
    return torch.stack([gnum, gden, start[1] * gnum + start[2] * gden], dim=-1)


def _sum_of_steps(x: torch.Tensor) -> torch.Tensor:
    """The sum over steps, [B, C]; fp32 adds one step after the other."""
    import torch

    if x.dtype == torch.float64:
        return x.sum(1)
    total = x.new_zeros(x.shape[0], x.shape[2])
    for x_t in x.unbind(1):
        total = total + x_t
    return total


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """max(|y|, root of the sum of the terms' squares).

    With all exponents doubled and all factors squared, the recurrence sums the terms' squares; its
    exponents are exactly twice those of the recurrence itself. The scale of the state's max is the
    largest key, from which decays are subtracted.

    In gw, the contribution of step s to step t is a term that occurs t - s times, once per decay
    between the steps, always with the same error. The sum of ((t - s) * term)^2 is the derivative,
    with respect to the decay, of the sum of (t - s) * term^2.

    A weight e^x has an error proportional to its exponent, which grows with the decay and the keys.
    In the final state this error is visible if all but early steps contribute 0, so the terms there
    include it. y, gk and gv have so many elements that such errors already show in the error of the
    definition.
    """
    import torch

    decay, slope = log_decay(inputs["w"], scalars)
    k, v, u = inputs["k"], inputs["v"], inputs["u"]
    one, start = torch.ones_like(v), _given(inputs)
    states = _states(k, v, one, decay, start)
    doubled = (2 * start[0], start[1].square(), start[2].square())
    squares = _states(2 * k, v.square(), one, 2 * decay, doubled)
    exponent, a, b = added(_before(states), 0.0, u + k, v, one)
    y2 = added(_before(squares), 0.0, 2 * (u + k), v.square(), one)[1] / b.square()
    if pass_name == "forward":
        first = torch.where(start[0] > EMPTY / 2, start[0], 0.0)[:, None]
        exponents = torch.cat([first, k], dim=1).nan_to_num(0.0, 0.0, 0.0).abs().amax(1)
        parts = [*_state_terms(inputs, decay, start, _at(states, -1)[0]), exponents]
        terms = {"y": y2.sqrt(), "final_state": torch.stack(parts, dim=-1)}
    else:
        y2 = y2.maximum((a / b).square())
        r2 = (inputs["gy"] / b).square()
        end = _end(inputs, _at(states, -1), 2)

        def adjoint_of(decay2: torch.Tensor) -> Pair:
            return _adjoint(2 * exponent, r2, r2 * y2, decay2, (2 * end[0], *end[1:]))

        def by_decay(shift: float) -> torch.Tensor:
            decay2 = 2 * decay + shift
            m, num, den = _before(_states(2 * k, v.square(), one, decay2, doubled))
            n, ga, gd = _after(adjoint_of(decay2))
            return ((decay2 + m + n).exp() * (num * ga + den * gd)).sum((0, 1))

        adjoint = adjoint_of(2 * decay)
        n, ga, gd = _after(adjoint)
        own, later = (2 * (u + k - exponent)).exp() * r2, (2 * k + n).exp()
        gu = own * (v.square() + y2)
        gw = ((by_decay(_SHIFT) - by_decay(-_SHIFT)) / (2 * _SHIFT)).clamp_min(0.0).sqrt()
        terms = {
            "gk": (gu + later * (v.square() * ga + gd)).sqrt(),
            "gv": (own + later * ga).sqrt(),
            "gw": slope.abs() * gw * (1 + _exponents(decay, k)),
            "gu": gu.sum((0, 1)).sqrt(),
            "ginitial_state": _by_state(doubled, _at(adjoint, 0)).sqrt(),
        }
    return {name: y.abs().maximum(terms[name]) for name, y in outputs.items()}


def _state_terms(
    x: Tensors, decay: torch.Tensor, start: Pair, last: torch.Tensor
) -> list[torch.Tensor]:
    """Roots of the sums of the squared terms of the final numerator and denominator, [B, C] each.

    A term e^x v counts as (1 + |x|) e^x v, because the relative error of e^x is proportional to x.
    """
    import torch

    steps = x["k"].shape[1]
    later = torch.arange(steps, -1, -1, device=decay.device, dtype=decay.dtype)[:, None]
    # Decays of the initial state, then of each step. The last step has no decay: 0 * -inf is NaN.
    decays = torch.where(later > 0, later * decay, 0.0)
    exponents = torch.cat([start[0][:, None], x["k"]], 1) + decays - last[:, None]
    weights = (exponents.exp() * (1 + exponents.abs().clamp_max(1e3))).square()
    ones = torch.ones_like(x["v"])
    return [
        (weights * torch.cat([first[:, None], terms], 1).square()).sum(1).sqrt()
        for first, terms in ((start[1], x["v"]), (start[2], ones))
    ]


def _exponents(decay: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The magnitude of exponents, [C]: the larger of the decay's and of the largest key's."""
    import torch

    if k.shape[0] * k.shape[1] == 0:
        return decay.abs().clamp_max(1e3)
    keys = k.nan_to_num(0.0, 0.0, 0.0).abs().amax((0, 1)).clamp_max(1e3)
    return torch.maximum(decay.abs().clamp_max(1e3), keys)
