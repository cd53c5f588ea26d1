"""The definition of timex: the published formula, its gradients, and what NaN may reach."""

from __future__ import annotations

import pytest
import torch

from kgen.model.problem import parse_problem
from kgen.operators.timex import OPERATOR, definition, make_inputs, scale

B, C, T = 2, 3, 7


def inputs(case: str, pass_name: str = "forward") -> dict[str, torch.Tensor]:
    problem = parse_problem(f"B={B},C={C},T={T},dtype=fp32", OPERATOR.signature)
    generator = torch.Generator().manual_seed(1)
    made = make_inputs(pass_name, problem, case, generator, torch.device("cpu"))
    return {name: x.double() for name, x in made.items()}


def test_forward_is_the_published_formula() -> None:
    given = inputs("normal")
    w, k = given["w"], given["k"]
    out = definition("forward", given, {"eps": 0.5})["out"]
    for b in range(B):
        for c in range(C):
            for t in range(T):
                terms = [w[c, T - 1 - (t - u)] * k[b, c, u] for u in range(t + 1)]
                torch.testing.assert_close(out[b, c, t], 0.5 + sum(terms))


def test_backward_is_the_gradient_of_forward() -> None:
    given = inputs("normal", "backward")
    w, k = given["w"].requires_grad_(), given["k"].requires_grad_()
    out = torch.stack(
        [
            sum((w[:, T - 1 - d] * k[..., t - d] for d in range(t + 1)), torch.zeros(B, C).double())
            for t in range(T)
        ],
        dim=-1,
    )
    want = torch.autograd.grad(out, (w, k), given["gout"])
    found = definition("backward", {n: x.detach() for n, x in given.items()}, {})
    torch.testing.assert_close(found["gw"], want[0])
    torch.testing.assert_close(found["gk"], want[1])


@pytest.mark.parametrize("name", ["w", "k"])
def test_nan_reaches_only_what_depends_on_it(name: str) -> None:
    given = inputs("normal")
    given[name][..., 4] = torch.nan
    out = definition("forward", given, {"eps": 0.0})["out"]
    first = 4 if name == "k" else T - 1 - 4  # w[T-1-d] is tap d
    assert out[..., :first].isfinite().all()
    assert out[..., first:].isnan().all()


def test_sums_of_16_bit_inputs_are_fp32() -> None:
    problem = parse_problem("B=1,C=1,T=4096,dtype=bf16", OPERATOR.signature)
    made = make_inputs("forward", problem, "positive", torch.Generator(), torch.device("cpu"))
    out = definition("forward", made, {"eps": 0.0})["out"]
    assert out.dtype == torch.bfloat16
    want = definition("forward", {n: x.double() for n, x in made.items()}, {"eps": 0.0})["out"]
    assert ((out.double() - want).abs() <= 2.0**-8 * want).all()


@pytest.mark.parametrize("case", OPERATOR.cases)
def test_scale_is_the_magnitude_of_what_is_summed(case: str) -> None:
    given = inputs(case)
    outputs = definition("forward", given, {"eps": 0.0})
    magnitude = scale("forward", given, outputs, {"eps": 0.0})["out"]
    finite = outputs["out"].isfinite()
    assert (magnitude >= outputs["out"].abs())[finite].all()
    terms = definition("forward", {n: x.abs() for n, x in given.items()}, {"eps": 0.0})["out"]
    assert (magnitude <= terms * (1 + 1e-9))[finite].all()


def test_cost_counts_each_tensor_once() -> None:
    problem = parse_problem("B=32,C=768,T=768,dtype=fp32", OPERATOR.signature)
    assert OPERATOR.cost("forward", problem).bytes == 4 * (2 * 32 * 768 * 768 + 768 * 768)
    assert OPERATOR.cost("forward", problem).flops == 32 * 768 * 768 * 769
    assert OPERATOR.cost("backward", problem).flops == 2 * 32 * 768 * 768 * 769
