"""Trial calls of published functions on small random inputs; part of `patch`.

A trial has the arguments of a call by position and name, and the outputs that the definition gives
in fp64: y first, then what the call returns as its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Sizes that the published kernels accept.
_BATCH, _STEPS, _HEADS, _FEATURES = 2, 16, 2, 32
# Share of the largest element: published kernels round the operands of fp32 products to TF32.
_TOLERANCE = 5e-3


class Call(NamedTuple):
    """A call, and what it must return.

    Attributes:
        arguments: The arguments by name.
        wanted: The expected y and final state.
        read: Extracts y and the final state from the function's result.
    """

    arguments: dict[str, Any]
    wanted: tuple[Tensor, ...]
    read: Callable[[Any], Sequence[Tensor]] = tuple


class Trial:
    """Random inputs on a device; reproducible."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator).to(self._device)

    def rows(self, *, positive: bool = False) -> Tensor:
        """A random tensor [B, T, H, features]."""
        shape = (_BATCH, _STEPS, _HEADS, _FEATURES)
        return self.uniform(*shape) if positive else self.normal(*shape) * 0.5

    def state(self) -> Tensor:
        return self.normal(_BATCH, _HEADS, _FEATURES, _FEATURES) * 0.5


def tried(function: Callable[..., Any], call: Call, device: torch.device) -> bool | str:
    """Whether a function returns the expected results of a call; or why it did not run."""
    if device.type not in ("cpu", "cuda"):
        return f"there are no values on {device}"
    try:
        with torch.no_grad():
            given = call.read(function(**call.arguments))
    except Exception as trouble:  # for example an error class of a kernel language
        return f"{type(trouble).__name__}: {(str(trouble).splitlines() or [''])[0]:.80}"
    if len(given) != len(call.wanted):
        return False
    return all(map(_agree, given, call.wanted))


def _agree(given: object, wanted: Tensor) -> bool:
    if not isinstance(given, Tensor) or given.shape != wanted.shape:
        return False
    return bool((given.double() - wanted).abs().amax() <= _TOLERANCE * wanted.abs().amax())


def _matrix_state(
    r: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, u: Tensor | None = None,
    a: Tensor | None = None, b: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the last state of S_t = diag(d_t) S_{t-1} + b_t (a_t S_{t-1})^T + k_t v_t^T.

    y_t is r_t S_t; with u it is r_t (S_{t-1} + diag(u) k_t v_t^T).
    """
    r, k, v, decay, state = (x.double() for x in (r, k, v, decay, state))
    outputs = []
    for t in range(r.shape[1]):
        new = k[:, t, :, :, None] * v[:, t, :, None, :]
        before, state = state, state * decay[:, t, :, :, None] + new
        if a is not None and b is not None:
            read = torch.einsum("bhk,bhkv->bhv", a[:, t].double(), before)
            state = state + b[:, t, :, :, None].double() * read[:, :, None, :]
        seen = state if u is None else before + u.double()[:, :, None] * new
        outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], seen))
    return torch.stack(outputs, dim=1), state


def _fla_rwkv6(draw: Trial) -> Call:
    r, k, v, state = draw.rows(), draw.rows(), draw.rows(), draw.state()
    w, u = -draw.rows(positive=True), draw.normal(_HEADS, _FEATURES)
    scale = _FEATURES**-0.5  # its default
    return Call(
        {"r": r, "k": k, "v": v, "w": w, "u": u, "initial_state": state,
         "output_final_state": True},
        _matrix_state(r * scale, k, v, w.exp(), state, u))


def _fla_rwkv7(draw: Trial, *, fused_mul: bool = False) -> Call:
    r, k, v, state = draw.rows(), draw.rows(), draw.rows(), draw.state()
    w, a = -draw.rows(positive=True) * 0.6, draw.rows(positive=True)
    kk = torch.nn.functional.normalize(draw.rows(), dim=-1)
    replaced = {"kk": kk, "a": a} if fused_mul else {"a": -kk, "b": kk * a}
    return Call(
        {"r": r, "w": w, "k": k, "v": v, **replaced, "scale": 0.5, "initial_state": state,
         "output_final_state": True},
        _matrix_state(r * 0.5, k, v, w.exp(), state, a=-kk, b=kk * a))


def _fla_linear_attn(draw: Trial) -> Call:
    q, k, v, state = draw.rows(positive=True), draw.rows(positive=True), draw.rows(), draw.state()
    return Call(
        {"q": q, "k": k, "v": v, "initial_state": state, "output_final_state": True,
         "normalize": False},
        _matrix_state(q * _FEATURES**-0.5, k, v, torch.ones_like(k), state))


def _transformers_rwkv(draw: Trial, *, per_step: bool) -> Call:
    """rwkv5 and rwkv6: flat rows, raw decays."""
    r, k, v, state = draw.rows(), draw.rows(), draw.rows(), draw.state()
    w, u = draw.rows() - 1, draw.normal(_HEADS, _FEATURES)
    decay = w if per_step else w[:1, :1].expand_as(w)
    return Call(
        {"training": False, "receptance": r.flatten(2), "key": k.flatten(2),
         "value": v.flatten(2), "time_decay": w.flatten(2) if per_step else w[0, 0],
         "time_first": u, "state": state},
        _matrix_state(r, k, v, (-decay.exp()).exp(), state, u))


def _transformers_rwkv4(draw: Trial) -> Call:
    k, v = draw.rows().flatten(2), draw.rows().flatten(2)
    decay, first = draw.normal(k.shape[-1]), draw.normal(k.shape[-1])
    state = [draw.normal(*k[:, 0].shape), 1 + draw.uniform(*k[:, 0].shape),
             draw.normal(*k[:, 0].shape)]
    weight = state[2].double().exp()
    num, den = state[0].double() * weight, state[1].double() * weight
    shrink, outputs = (-decay.double().exp()).exp(), []
    for t in range(k.shape[1]):
        now, value = k[:, t].double(), v[:, t].double()
        bonus = (first.double() + now).exp()
        outputs.append((num + bonus * value) / (den + bonus))
        num, den = shrink * num + now.exp() * value, shrink * den + now.exp()

    def read(made: Any) -> Sequence[Tensor]:
        out, last = made
        scale = last[2].double().exp()
        return out, last[0].double() * scale, last[1].double() * scale

    return Call(
        {"time_decay": decay, "time_first": first, "key": k, "value": v, "state": state,
         "return_state": True},
        (torch.stack(outputs, dim=1), num, den), read)


TRIALS: dict[str, Callable[[Trial], Call]] = {
    "chunk_linear_attn": _fla_linear_attn,
    "fused_chunk_linear_attn": _fla_linear_attn,
    "fused_recurrent_linear_attn": _fla_linear_attn,
    "chunk_rwkv6": _fla_rwkv6,
    "fused_recurrent_rwkv6": _fla_rwkv6,
    "chunk_rwkv7": _fla_rwkv7,
    "fused_recurrent_rwkv7": _fla_rwkv7,
    "fused_mul_recurrent_rwkv7": lambda draw: _fla_rwkv7(draw, fused_mul=True),
    "rwkv_linear_attention": _transformers_rwkv4,
    "rwkv5_linear_attention": lambda draw: _transformers_rwkv(draw, per_step=False),
    "rwkv6_linear_attention": lambda draw: _transformers_rwkv(draw, per_step=True),
}
