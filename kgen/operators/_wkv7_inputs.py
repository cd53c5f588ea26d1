"""Draws the inputs of wkv7: those that occur in models, and those that break naive kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.operators._shared import case_factor, plant_at_ends
from kgen.operators._wkv import _log_decays
from kgen.operators._wkv7_signature import DECAY_FORM

if TYPE_CHECKING:
    import torch

CASES = (
    "tiny", "huge", "positive", "alternating", "extreme_decay", "no_decay", "rare_decays", "mixed",
    "delta_rule", "nonfinite", "nonfinite_ends",
)


def make_inputs(
    pass_name: str,
    problem: Problem,
    case: str,
    generator: torch.Generator,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Draw the inputs; the case decides scale, signs, decays and special values.

    a = -kk and b = kk * gate, with a unit vector kk and a gate between 0 and 1 for each key, as in
    a model: with a transition that lets the state grow, the oracle would overflow after a few
    hundred steps. r and k shrink as T grows, so that sums over T stay within fp16's range without a
    decay. Decays are 0.07 to 0.998 per step, or 0.64 to 0.9985 with decay_form=clamp. The cases of
    decays are those of wkv6; with decay_form=clamp the strongest decay is 0.545.

    In `delta_rule` the gate is 1, so b = -a: the key's old value is replaced, not blended. In every
    second head a = -k as well.

    `nonfinite` plants a NaN in r, k, v, gy and w. In the forward pass, k gets an Inf in the last
    step instead: for an Inf in an earlier step, the result would depend on whether an algorithm
    multiplies it by a decay that has been rounded to 0. `nonfinite_ends` is that of wkv6.
    """
    import torch

    b, n, t, h, k, v = problem.shape(("B", "N", "T", "H", "K", "V"))
    dtype = getattr(torch, problem.dtype("dtype").torch)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    drawn: dict[str, torch.Tensor] = {}
    for name in ("r", "k"):
        x = draw(b, t, h, k)
        drawn[name] = (x.abs() if case == "positive" else x) / max(t, 1) ** 0.25
    unit = torch.nn.functional.normalize(draw(b, t, h, k), dim=-1)
    drawn["a"], drawn["b"] = -unit, unit * draw(b, t, h, k).sigmoid()
    if case == "delta_rule":
        drawn["b"] = unit
        drawn["k"][:, :, ::2] = unit[:, :, ::2]
    sign = 1 - 2 * (torch.arange(t, device=device) % 2).view(t, 1, 1)
    for name in ("v",) if pass_name == "forward" else ("v", "gy"):
        x = draw(b, t, h, v)
        if case in ("positive", "alternating"):
            x = x.abs()
        if case == "alternating":
            x = x * sign
        drawn[name] = x * case_factor(case, dtype)
    w = _in_form(_log_decays(case, (b, t, h, k), generator, device), problem)
    if case == "nonfinite" and b * h * t:
        nan = float("nan")
        drawn["r"][b // 2, t - 1, h // 2, k - 1] = nan
        drawn["v"][0, t // 2, 0, v // 2] = nan
        w[b // 2, t // 4, 0, 0] = nan
        if pass_name == "forward":
            drawn["k"][b - 1, t - 1, h - 1, k // 2] = float("inf")
        else:
            drawn["k"][b - 1, t // 3, h - 1, k // 2] = nan
            drawn["gy"][0, t // 3, h - 1, 0] = nan
    drawn = {name: x.to(dtype) for name, x in drawn.items()}
    drawn["w"] = w.to(getattr(torch, problem.dtype("w_dtype").torch))
    wide = {"initial_state": "initial_state_dtype"}
    if pass_name == "backward":
        wide["gfinal_state"] = "final_state_dtype"
    for name, field in wide.items():
        if problem.dtype(field).itemsize:
            drawn[name] = draw(n, h, k, v)
    if problem.dtype("cu_seqlens_dtype").itemsize:
        # Random boundaries: some sequences may have no step, or most of the steps.
        cuts = torch.randint(0, t + 1, (n - 1,), generator=generator, device=device)
        ends = torch.tensor([0, t], device=device)
        offsets = torch.cat([ends[:1], cuts.sort().values, ends[1:]])
        drawn["cu_seqlens"] = offsets.to(getattr(torch, problem.dtype("cu_seqlens_dtype").torch))
    if case == "nonfinite_ends":
        plant_at_ends(drawn)
    return drawn


def _in_form(log_decays: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Convert raw logits log(-log decay) to w in the decay form that a problem chose."""
    form = dict(problem.dtypes)[DECAY_FORM.name]
    return log_decays if form == "log" else (-log_decays).log()
