"""Inputs whose memory does not directly hold their values, on the host's kernels.

They have PyTorch's negative bit, no memory (`ZeroTensor`), strides of 0, or no elements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from operator_cases import CASES, Case, Outputs, agree, close, wide
from torch import Tensor

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
X, W = torch.randn(4, 16), torch.randn(16)


def negated(x: Tensor) -> Tensor:
    """A tensor of the same values, whose memory holds their negatives."""
    made = torch._neg_view(-x.detach())
    assert made.is_neg()
    return made


def unresolved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: negated(x).requires_grad_() for name, x in inputs.items()}


def rmsnorm64(x: Tensor, w: Tensor) -> Tensor:
    x64 = x.double()
    return x64 * (x64.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()


def without_gradients(kgen_ops: ModuleType, case: Case, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        want = case.reference(**wide(inputs))
        for one, other in zip(case.call(kgen_ops, **inputs), want, strict=False):
            close(one, other)


def forget(kgen_ops: ModuleType, case: Case) -> list[Any]:
    module = sys.modules[f"{kgen_ops.__name__}.{case.operator}"]
    for served in (module.FORWARD, module.BACKWARD):
        served.forget()
    return [module.FORWARD, module.BACKWARD]


@each_case
def test_a_negative_bit_is_resolved(kgen_ops: ModuleType, case: Case) -> None:
    """By the first call, where a launch is prepared for the layout, and with gradients."""
    forget(kgen_ops, case)
    for _ in range(2):
        without_gradients(kgen_ops, case, unresolved(case.inputs()))
    without_gradients(kgen_ops, case, case.inputs())
    without_gradients(kgen_ops, case, unresolved(case.inputs()))
    agree(case, lambda **given: case.call(kgen_ops, **given), unresolved(case.inputs()))


@each_case
def test_each_input_alone_may_have_it(kgen_ops: ModuleType, case: Case) -> None:
    for name in case.inputs():
        inputs = case.inputs()
        inputs[name] = negated(inputs[name]).requires_grad_()
        agree(case, lambda **given: case.call(kgen_ops, **given), inputs)


@each_case
def test_beside_a_fast_path(kgen_ops: ModuleType, extensions: Any, case: Case) -> None:
    """No fast path serves such a call, and none is made for one."""
    served = forget(kgen_ops, case)
    for _ in range(4):
        agree(case, lambda **given: case.call(kgen_ops, **given), unresolved(case.inputs()))

    def count() -> int:
        return sum(len(paths) for one in served for paths in one.fast_paths.values())

    inputs = case.inputs()
    for _ in range(4):
        without_gradients(kgen_ops, case, inputs)
    prepared = [launch for one in served for launch in one.prepared.values()]
    assert count() > 0 or any(launch.record is None for launch in prepared)  # of safe kernels
    without_gradients(kgen_ops, case, unresolved(case.inputs()))
    agree(case, lambda **given: case.call(kgen_ops, **given), unresolved(case.inputs()))
    forget(kgen_ops, case)


@each_case
def test_gradients_with_a_negative_bit(
    kgen_ops: ModuleType, extensions: Any, case: Case
) -> None:
    inputs = case.inputs()
    given = wide(inputs)
    got, want = case.call(kgen_ops, **inputs), case.reference(**given)
    weights = [torch.randn(y.shape) for y in want]
    gradients = torch.autograd.grad(got[: len(want)], list(inputs.values()),
                                    [negated(weight) for weight in weights])
    wanted = torch.autograd.grad(want, list(given.values()), [w.double() for w in weights])
    for one, other in zip(gradients, wanted, strict=True):
        close(one, other)


@each_case
def test_through_the_dispatcher(kgen_ops: ModuleType, case: Case) -> None:
    operator = getattr(torch.ops.kgen_ops, case.operator)

    def function(**tensors: Tensor) -> Outputs:
        found = operator(**tensors, **case.keywords)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    agree(case, function, unresolved(case.inputs()))


def compiled(kgen_ops: ModuleType, backend: str, inside: bool) -> None:
    """Compare compiled code whose operator gets tensors with the bit, made inside or given."""
    torch._dynamo.reset()
    case = CASES["rmsnorm-residual"]

    def function(**tensors: Tensor) -> Outputs:
        if inside:
            tensors = {name: torch._neg_view(-x) for name, x in tensors.items()}
        first, *rest = case.call(kgen_ops, **tensors)
        return first * 1.0, *rest

    inputs = case.inputs() if inside else unresolved(case.inputs())
    agree(case, torch.compile(function, fullgraph=True, backend=backend), inputs)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(kgen_ops: ModuleType, inside: bool) -> None:
    compiled(kgen_ops, "aot_eager", inside)


def test_compiled_with_inductor(kgen_ops: ModuleType) -> None:
    compiled(kgen_ops, "inductor", inside=True)


@pytest.mark.xfail(
    strict=True, raises=AssertionError,
    reason="Inductor ignores the bit of a graph's inputs, whatever the operator: "
           "github.com/pytorch/pytorch/issues/145093",
)
def test_inputs_of_code_compiled_with_inductor(kgen_ops: ModuleType) -> None:
    compiled(kgen_ops, "inductor", inside=False)


def test_vmap(kgen_ops: ModuleType) -> None:
    x = torch.randn(3, 4, 16)
    got = torch.func.vmap(kgen_ops.rmsnorm, (0, None))(negated(x), negated(W))
    close(got, rmsnorm64(x, W))


def test_the_imaginary_part_of_a_conjugate(kgen_ops: ModuleType) -> None:
    z = torch.randn(4, 16, dtype=torch.complex64)
    x = z.conj().imag
    assert x.is_neg()
    close(kgen_ops.rmsnorm(x, W), rmsnorm64(-z.imag, W))
    with pytest.raises(TypeError, match=r"x has dtype torch\.complex64; supported"):
        kgen_ops.rmsnorm(z.conj(), W)


def test_autocast(kgen_ops: ModuleType) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = kgen_ops.rmsnorm(negated(X), negated(W.bfloat16()))
    torch.testing.assert_close(y.double(), rmsnorm64(X, W), rtol=3e-2, atol=3e-2)


def test_zeros_without_memory(kgen_ops: ModuleType) -> None:
    """They have a null pointer, which to a kernel means an input that was left out."""
    x, w = torch._efficientzerotensor((4, 16)), torch._efficientzerotensor((16,))
    for _ in range(2):
        assert (kgen_ops.rmsnorm(x, W) == 0).all()
        assert (kgen_ops.rmsnorm(X, w) == 0).all()
    close(kgen_ops.rmsnorm(X, W), rmsnorm64(X, W))


@each_case
def test_strides_of_0(kgen_ops: ModuleType, case: Case) -> None:
    """Each dim of free stride is expanded, alone and with those before it."""
    signature = sys.modules[f"{kgen_ops.__name__}.{case.operator}"].FORWARD.signature
    count = 0
    for argument in signature.inputs:
        if not argument.free_strides or argument.name not in case.inputs():
            continue
        plain = case.inputs()[argument.name].detach()
        outer = plain.ndim - len(argument.dims) + len(argument.free_strides)
        for axis in range(outer):
            for first in {0, axis}:
                inputs = case.inputs()
                one = plain[tuple(slice(0, 1 if first <= i <= axis else None)
                                  for i in range(plain.ndim))]
                expanded = one.expand(plain.shape)
                assert expanded.stride(axis) == 0
                inputs[argument.name] = expanded.requires_grad_()
                agree(case, lambda **given: case.call(kgen_ops, **given), inputs)
                count += 1
    assert count or case.operator == "timex"


@pytest.mark.parametrize("make", [
    lambda: torch.randn(1, 1).expand(4, 16), lambda: torch.randn(4, 1).expand(4, 16),
])
def test_a_row_of_one_number_is_refused(
    kgen_ops: ModuleType, make: Callable[[], Tensor]
) -> None:
    with pytest.raises(ValueError, match=r"x has shape .* dim N must be contiguous"):
        kgen_ops.rmsnorm(make(), W)
    with pytest.raises(ValueError, match=r"w has shape .* pass w.contiguous\(\)"):
        kgen_ops.rmsnorm(X, torch.randn(1).expand(16))


@each_case
def test_no_elements_with_a_negative_bit(kgen_ops: ModuleType, case: Case) -> None:
    signature = sys.modules[f"{kgen_ops.__name__}.{case.operator}"].FORWARD.signature
    batched = {a.name for a in signature.inputs if a.dims[0] in ("B", "N", "M")}
    batched -= set(case.unmapped)
    inputs = {name: negated(x[:0] if name in batched else x).requires_grad_()
              for name, x in case.inputs().items()}
    agree(case, lambda **given: case.call(kgen_ops, **given), inputs)
