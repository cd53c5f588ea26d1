"""Calls of each operator with gradients, and the same computations in plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import references
import torch
from torch import Tensor

B, T, H, K, V = 2, 6, 4, 5, 3
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A way to call an operator.

    Attributes:
        operator: Name of the operator.
        inputs: Makes the input tensors; all of them require a gradient.
        keywords: Further arguments of the call.
        reference: The same computation in plain PyTorch.
        unmapped: Inputs that all elements of a batch share.
    """

    operator: str
    inputs: Callable[[], dict[str, Tensor]]
    keywords: dict[str, Any]
    reference: Callable[..., Outputs]
    unmapped: tuple[str, ...] = ()

    def call(self, kgen_ops: ModuleType, **tensors: Tensor) -> Outputs:
        """All outputs."""
        made = getattr(kgen_ops, self.operator)(**tensors, **self.keywords)
        return (made,) if isinstance(made, Tensor) else tuple(made)

    def inputs_on(self, device: str) -> dict[str, Tensor]:
        """The input tensors on a device."""
        return {n: x.detach().to(device).requires_grad_() for n, x in self.inputs().items()}

    def arguments(self, kgen_ops: ModuleType, device: str = "cpu") -> tuple[Any, ...]:
        """All arguments of the operator that is registered with torch."""
        signature = sys.modules[f"{kgen_ops.__name__}.{self.operator}"].FORWARD.signature
        given: dict[str, Any] = self.inputs_on(device) | self.keywords
        names = [a.name for a in signature.inputs]
        flags = ["return_" + f.removesuffix("_dtype") for f in signature.flags]
        tail = [s.default for s in signature.scalars], flags, signature.options
        return (*(given.get(name) for name in names), *tail[0],
                *(given.get(flag, False) for flag in tail[1]),
                *(option.default for option in tail[2]))


def randn(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def wkv(per_step: bool) -> Case:
    def inputs() -> dict[str, Tensor]:
        decay = -torch.rand(*((B, T) if per_step else ()), H, K)
        return {"r": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V),
                "w": decay.requires_grad_(), "u": randn(H, K),
                "initial_state": randn(B, H, K, V)}

    def reference(w: Tensor, initial_state: Tensor, **given: Tensor) -> Outputs:
        decay = w.exp().expand(given["r"].shape)
        return references.recurrence(**given, decay=decay, state=initial_state)

    return Case("wkv6" if per_step else "wkv5", inputs, {"return_final_state": True}, reference,
                ("u",) if per_step else ("w", "u"))


def wkv4_inputs() -> dict[str, Tensor]:
    state = torch.stack([torch.randn(B, K), 1 + torch.rand(B, K), torch.randn(B, K)], dim=-1)
    return {"k": randn(B, T, K), "v": randn(B, T, K), "w": (-torch.rand(K)).requires_grad_(),
            "u": randn(K), "initial_state": state.requires_grad_()}


def wkv4_reference(initial_state: Tensor, **given: Tensor) -> Outputs:
    return references.wkv4(**given, state=initial_state)


def wkv7() -> Case:
    def inputs() -> dict[str, Tensor]:
        unit = torch.nn.functional.normalize(torch.randn(B, T, H, K), dim=-1)
        return {"r": randn(B, T, H, K), "w": (-torch.rand(B, T, H, K)).requires_grad_(),
                "k": randn(B, T, H, K), "v": randn(B, T, H, V), "a": (-unit).requires_grad_(),
                "b": (unit * torch.rand(B, T, H, K)).requires_grad_(),
                "initial_state": randn(B, H, K, V)}

    def reference(w: Tensor, initial_state: Tensor, **given: Tensor) -> Outputs:
        return references.recurrence7(**given, decay=w.exp(), state=initial_state)

    return Case("wkv7", inputs, {"return_final_state": True}, reference)


def qkv() -> dict[str, Tensor]:
    return {"q": torch.rand(B, H, T, K).requires_grad_(),
            "k": torch.rand(B, H, T, K).requires_grad_(), "v": randn(B, H, T, V)}


def attention(norm: bool) -> Callable[..., Outputs]:
    def reference(
        q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor | None = None
    ) -> Outputs:
        state = q.new_zeros(*q.shape[:2], K, V) if initial_state is None else initial_state
        keys = q.new_zeros(q.shape[0], 1, q.shape[1], K) if norm else None
        by_step = [x.transpose(1, 2) for x in (q, k, v)]
        made = references.attention(by_step[0], by_step[1], by_step[2], state, keys, 1.0)
        return made[0].transpose(1, 2), *([] if norm else made[1:2])

    return reference


CASES = {
    "rmsnorm": Case("rmsnorm", lambda: {"x": randn(2, 3, 16), "w": randn(16)}, {},
                    references.rmsnorm, ("w",)),
    "rmsnorm-residual": Case(
        "rmsnorm", lambda: {"x": randn(4, 16), "w": randn(16), "residual": randn(4, 16)}, {},
        references.rmsnorm, ("w",)),
    "timex": Case("timex", lambda: {"w": randn(4, T), "k": randn(B, 4, T)}, {}, references.timex,
                  ("w",)),
    "attention": Case(
        "linear_attention", lambda: {**qkv(), "initial_state": randn(B, H, K, V)},
        {"return_final_state": True}, attention(norm=False)),
    "attention-norm": Case("linear_attention", qkv, {"return_norm": True}, attention(norm=True)),
    "wkv4": Case("wkv4", wkv4_inputs, {"return_final_state": True}, wkv4_reference, ("w", "u")),
    "wkv5": wkv(per_step=False),
    "wkv6": wkv(per_step=True),
    "wkv7": wkv7(),
}


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-4, atol=2e-4)


def wide(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().double().requires_grad_() for name, x in inputs.items()}


def weighed(outputs: Outputs, weights: list[Tensor]) -> Tensor:
    """A scalar that depends on all differentiable outputs."""
    return torch.stack([(y * x).sum() for y, x in zip(outputs, weights, strict=False)]).sum()


def agree(case: Case, function: Callable[..., Outputs], inputs: dict[str, Tensor]) -> None:
    """Assert that outputs and gradients agree with the reference of the case."""
    given = wide(inputs)
    got, want = function(**inputs), case.reference(**given)
    for y, y64 in zip(got, want, strict=False):
        close(y, y64)
    assert all(not y.requires_grad for y in got[len(want):])  # norm, rstd
    weights = [torch.randn(y.shape, device=y.device) for y in want]
    gradients = torch.autograd.grad(weighed(got, weights), list(inputs.values()))
    wanted = torch.autograd.grad(weighed(want, [w.double() for w in weights]),
                                 list(given.values()))
    for x, gradient, gradient64 in zip(inputs.values(), gradients, wanted, strict=True):
        assert gradient.dtype == x.dtype
        close(gradient, gradient64)


def agree_with(
    reference: Callable[..., Outputs],
    function: Callable[..., Outputs],
    inputs: dict[str, Tensor],
) -> None:
    """Assert that outputs, their shapes, and their gradients for every input agree."""
    given = wide(inputs)
    got, want = function(**inputs), reference(**given)
    assert [tuple(y.shape) for y in got] == [tuple(y.shape) for y in want]
    seeds = [torch.randn(y.shape) for y in want]
    for y, y64 in zip(got, want, strict=True):
        close(y, y64)
    gradients = torch.autograd.grad(got, list(inputs.values()), seeds)
    wanted = torch.autograd.grad(want, list(given.values()), [x.double() for x in seeds])
    for x, gradient, gradient64 in zip(inputs.values(), gradients, wanted, strict=True):
        assert gradient.dtype == x.dtype
        close(gradient, gradient64)
