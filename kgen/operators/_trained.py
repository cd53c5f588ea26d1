"""Inputs with distributions of trained models, for timing: `Operator.trained` of RWKV operators.

Sources of the numbers:

- Decays at initialisation: https://github.com/BlinkDL/RWKV-LM, `time_decay` of RWKV-v4/src/model.py
  and of RWKV-v5/src/model.py (versions 5 and 6), `w0` of RWKV-v7/train_temp/src/model.py.
- The decay of RWKV-6 and RWKV-7 moves with the data, by a low-rank projection that is added to the
  parameter: Peng et al. 2024, arXiv:2404.05892, and Peng et al. 2025, arXiv:2503.14456.
- Strong channels: nothing bounds exp(w) of RWKV-4 to RWKV-6. In a training run the gate of RWKV-6
  passed 20: https://github.com/fla-org/flash-linear-attention/issues/77 and pull request 78.
- Large keys: RWKV-v2-RNN/src/model.py and RWKV-v3/src/model.py clamp them at 60.

These numbers are not published and therefore assumed: the share of channels that are strong or do
not decay (one in `_RARE` each), the noise of a step (0.3), and the spread of the channels' scales
(a factor of e^0.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

_RARE = 16  # one channel in this many is strong, another keeps its state
_DEPTH = 0.5  # position of the layer in the model: 0 is the first layer, 1 the last
_STEP_NOISE = 0.3
_SPREAD = 0.4


def places(channels: int, device: torch.device) -> torch.Tensor:
    """The relative position of each channel in its layer, 0 to 1."""
    import torch

    return torch.arange(channels, device=device) / max(channels - 1, 1)


def log_rates(
    first: float, range_: float, channels: int, generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """w of each channel, with log decay -exp(w): the initialisation's curve, and rare channels.

    w = first + range_ * place^(0.7 + 1.3 depth) + noise. One channel in 16 has a log decay of -5 to
    -7 per step, another of about -1e-4.
    """
    import torch

    def uniform() -> torch.Tensor:
        return torch.rand(channels, generator=generator, device=device)

    w = first + range_ * places(channels, device) ** (0.7 + 1.3 * _DEPTH)
    w += 0.5 * torch.randn(channels, generator=generator, device=device)
    kind = torch.arange(channels, device=device) % _RARE
    w = torch.where(kind == _RARE // 2, (5 + 2 * uniform()).log(), w)
    return torch.where(kind == _RARE - 1, math.log(1e-4) + uniform(), w)


def scaled(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Multiply each channel of a tensor [..., H, K] by a random scale."""
    import torch

    spread = torch.randn(x.shape[-2:], generator=generator, device=x.device)
    return (x * torch.exp(_SPREAD * spread)).to(x.dtype)


def in_form(w: torch.Tensor, form: str) -> torch.Tensor:
    """Convert w from the form `raw` to another decay form; see `decay_form` of wkv4 to wkv6."""
    if form == "raw":
        return w
    return -w.exp() if form == "log" else (-w.exp()).exp()


def wkv(
    pass_name: str, problem: Problem, inputs: Tensors, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """r, k and w of wkv5, wkv6 and their decode operators; see `log_rates` and `scaled`.

    w of wkv6 also changes from step to step, by noise that stands for a projection of the data.
    """
    import torch

    like = inputs["w"]
    heads, keys = like.shape[-2:]
    w = log_rates(-6.0, 5.0, heads * keys, generator, like.device).view(heads, keys)
    if like.ndim > 2:
        noise = torch.randn(like.shape, generator=generator, device=like.device)
        w = w + _STEP_NOISE * noise
    form = dict(problem.dtypes)["decay_form"]
    return {
        "w": in_form(w, form).to(like.dtype),
        "r": scaled(inputs["r"], generator),
        "k": scaled(inputs["k"], generator),
    }


def wkv4(
    pass_name: str, problem: Problem, inputs: Tensors, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """k, w and u of wkv4: w on the curve from -5 to 3, u near log 0.3 with a zigzag of 0.5.

    One channel in 16 has keys of several tens, which is why models clamp keys at 60.
    """
    import torch

    like, k = inputs["w"], inputs["k"]
    channels = like.shape[-1]
    at = torch.arange(channels, device=like.device)
    w = log_rates(-5.0, 8.0, channels, generator, like.device)
    u = math.log(0.3) + 0.5 * ((at + 1) % 3 - 1)
    large = torch.where(at % _RARE == 0, 8.0, 1.0)
    return {
        "k": (k * large).to(k.dtype),
        "w": in_form(w, dict(problem.dtypes)["decay_form"]).to(like.dtype),
        "u": u.to(inputs["u"].dtype),
    }


def wkv7(
    pass_name: str, problem: Problem, inputs: Tensors, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """r, w, k, a and b of wkv7 and wkv7_decode.

    The decay is exp(-exp(-0.5) sigmoid(x)), so it is at least 0.545. x is the initialisation's
    curve -5.5 + 6 place^(1 + depth^0.3), plus a zigzag of 2.5 over each head, plus noise per step.
    The gate of b is sigmoid(-0.19 + 0.3 zigzag + noise).
    """
    import torch

    like = inputs["w"]
    heads, keys = like.shape[-2:]
    zigzag = 2 * places(keys, like.device) - 1
    zigzag = zigzag * zigzag.abs()
    at = places(heads * keys, like.device).view(heads, keys)

    def noise() -> torch.Tensor:
        return _STEP_NOISE * torch.randn(like.shape, generator=generator, device=like.device)

    x = -5.5 + 6 * at ** (1 + _DEPTH**0.3) + 2.5 * zigzag + noise()
    form = dict(problem.dtypes)["decay_form"]
    log_decay = -math.exp(-0.5) * x.sigmoid()
    w = {"clamp": x, "log": log_decay, "raw": (-log_decay).log()}[form]
    gate = (-0.19 + 0.3 * zigzag + noise()).sigmoid()
    return {
        "w": w.to(like.dtype),
        "r": scaled(inputs["r"], generator),
        "k": scaled(inputs["k"], generator),
        "b": (-inputs["a"] * gate).to(inputs["b"].dtype),
    }
