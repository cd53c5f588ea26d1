"""Operators in training loops and servers, on the host's kernels.

The tests have checkpoints, hooks, frozen inputs, gradients in odd layouts, and inference mode.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from operator_cases import CASES, Case, Outputs, close, weighed, wide
from torch import Tensor
from torch.utils.checkpoint import checkpoint

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
Weights = list[Tensor]


def differentiated(
    case: Case, outputs: Outputs, inputs: dict[str, Tensor], weights: Weights
) -> Outputs:
    """Gradients of what the reference has, too; norm and rstd have none."""
    return torch.autograd.grad(weighed(outputs[: len(weights)], weights), list(inputs.values()))


def wanted(case: Case, inputs: dict[str, Tensor]) -> tuple[Weights, Outputs]:
    """Weights of a loss, and the gradients of that by the reference."""
    given = wide(inputs)
    outputs = case.reference(**given)
    weights = [torch.randn(y.shape) for y in outputs]
    loss = weighed(outputs, [w.double() for w in weights])
    return weights, torch.autograd.grad(loss, list(given.values()))


def all_close(got: Outputs, want: Outputs) -> None:
    for one, other in zip(got, want, strict=True):
        close(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
@each_case
def test_checkpoint(kgen_ops: ModuleType, case: Case, reentrant: bool) -> None:
    """The forward pass runs again in the backward pass, whose gradients are the same."""
    inputs = case.inputs()
    names = list(inputs)
    runs = 0

    def function(*tensors: Tensor) -> Outputs:
        nonlocal runs
        runs += 1
        return case.call(kgen_ops, **dict(zip(names, tensors, strict=True)))

    weights, want = wanted(case, inputs)
    outputs = checkpoint(function, *inputs.values(), use_reentrant=reentrant)
    weighed(outputs[: len(weights)], weights).backward()  # type: ignore[no-untyped-call]
    assert runs == 2
    all_close(tuple(x.grad for x in inputs.values() if x.grad is not None), want)


@each_case
def test_what_is_saved_may_be_packed(kgen_ops: ModuleType, case: Case) -> None:
    """Hooks see every saved tensor, and what they give back is used."""
    inputs = case.inputs()
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x.double()

    weights, want = wanted(case, inputs)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.float()):
        outputs = case.call(kgen_ops, **inputs)
    # Of a residual the sum is saved, in place of both.
    saved = {"w": inputs["w"], "h": outputs[1]} if "residual" in inputs else inputs
    assert {x.data_ptr() for x in packed} >= {x.data_ptr() for x in saved.values()}
    all_close(differentiated(case, outputs, inputs, weights), want)


@each_case
def test_inputs_that_are_frozen(kgen_ops: ModuleType, case: Case) -> None:
    """Each input alone wants a gradient, as when the rest of a model is not trained."""
    inputs = case.inputs()
    weights, want = wanted(case, inputs)
    for (name, _), gradient in zip(inputs.items(), want, strict=True):
        given = {n: x.detach().requires_grad_(n == name) for n, x in inputs.items()}
        outputs = case.call(kgen_ops, **given)
        (got,) = differentiated(case, outputs, {name: given[name]}, weights)
        close(got, gradient)


@each_case
def test_gradients_in_another_layout(kgen_ops: ModuleType, case: Case) -> None:
    """A loss of the transposed output hands a gradient back whose last dim is not contiguous."""
    inputs = case.inputs()
    weights, want = wanted(case, inputs)
    outputs = case.call(kgen_ops, **inputs)[: len(weights)]
    flipped = tuple(y.transpose(-1, -2) for y in outputs)
    gradients = [w.transpose(-1, -2).contiguous() for w in weights]
    assert not gradients[0].transpose(-1, -2).is_contiguous()
    all_close(torch.autograd.grad(flipped, list(inputs.values()), gradients), want)


@each_case
def test_a_saved_tensor_that_was_changed_is_an_error(kgen_ops: ModuleType, case: Case) -> None:
    inputs = case.inputs()
    name = next(iter(inputs))
    leaf = inputs[name]
    inputs[name] = changed = leaf * 1.0
    outputs = case.call(kgen_ops, **inputs)
    if "residual" in inputs:  # the sum is saved in its place
        changed = outputs[1]
    changed.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs[0].sum(), leaf)


@each_case
def test_gradients_accumulate(kgen_ops: ModuleType, case: Case) -> None:
    """Two micro-batches, and a hook on a leaf."""
    inputs = case.inputs()
    seen: list[str] = []
    for name, x in inputs.items():
        x.register_hook(  # type: ignore[no-untyped-call]
            lambda _, name=name: seen.append(name)
        )
    weights, want = wanted(case, inputs)
    for _ in range(2):
        outputs = case.call(kgen_ops, **inputs)
        weighed(outputs[: len(weights)], weights).backward()  # type: ignore[no-untyped-call]
    all_close(tuple(x.grad for x in inputs.values() if x.grad is not None),
              tuple(2 * x for x in want))
    assert sorted(seen) == sorted([*inputs, *inputs])


@pytest.mark.parametrize("way", ["function", "operator"])
@each_case
def test_inference_mode(kgen_ops: ModuleType, case: Case, way: str) -> None:
    inputs = case.inputs()

    def call(given: dict[str, Tensor]) -> Any:
        if way == "function":
            return case.call(kgen_ops, **given)
        made = getattr(torch.ops.kgen_ops, case.operator)(**given, **case.keywords)
        return (made,) if isinstance(made, Tensor) else tuple(made)

    want = case.reference(**wide(inputs))
    with torch.inference_mode():
        for given in (inputs, {n: x.clone() for n, x in inputs.items()}):
            outputs = call(given)
            assert all(y.is_inference() and not y.requires_grad for y in outputs)
            all_close(outputs[: len(want)], want)
