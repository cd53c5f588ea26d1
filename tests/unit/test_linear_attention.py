"""The definition of linear attention: the formula, its gradients, what NaN may reach, its peers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.model.problem import Problem, parse_problem
from kgen.operators._linear_attention_peers import peers
from kgen.operators.linear_attention import OPERATOR, cost, definition, make_inputs, scale

OPTIONAL = ("initial_state", "initial_key_sum", "final_state", "final_key_sum", "norm")
# Every pair of present and absent.
CHOICES = [(0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (1, 0, 1, 0, 0), (0, 1, 0, 1, 0), (1, 1, 0, 0, 1),
           (0, 0, 1, 1, 1), (1, 0, 0, 1, 1), (0, 1, 1, 0, 1)]

EVERY_CASE = list(product(OPERATOR.cases, ("forward", "backward")))


def problem(chosen: tuple[int, ...] = (0,) * 5, dims: str = "B=2,H=2,T=7,E=3,M=4") -> Problem:
    fields = ",".join(
        f"{name}_dtype=fp32" for name, there in zip(OPTIONAL, chosen, strict=True) if there
    )
    return parse_problem(f"{dims},dtype=fp32" + f",{fields}" * bool(fields), OPERATOR.signature)


def inputs(case: str, of: Problem, pass_name: str = "forward") -> dict[str, Tensor]:
    made = make_inputs(pass_name, of, case, torch.Generator().manual_seed(1), torch.device("cpu"))
    return {name: x.double() for name, x in made.items()}


def arguments(of: Problem, pass_name: str = "forward", **scalars: float) -> dict[str, float]:
    return OPERATOR.arguments(pass_name, of) | scalars


@pytest.mark.parametrize("chosen", CHOICES)
def test_forward_is_the_formula(chosen: tuple[int, ...]) -> None:
    of = problem(chosen)
    given = inputs("normal", of)
    q, k, v = given["q"], given["k"], given["v"]
    out = definition("forward", given, arguments(of, scale=0.5, eps=0.25))
    pairs = torch.einsum("bhte,bhse->bhts", q, k).tril()
    products = pairs @ v
    norm = pairs.sum(-1)
    if chosen[0]:
        products = products + q @ given["initial_state"]
    if chosen[1]:
        norm = norm + (q * given["initial_key_sum"][:, :, None]).sum(-1)
    norm = 0.5 * norm + 0.25
    want = 0.5 * products / norm[..., None] if chosen[4] else 0.5 * products
    torch.testing.assert_close(out["out"], want)
    torch.testing.assert_close(out["norm"], norm)
    state = k.transpose(-1, -2) @ v + given.get("initial_state", 0)
    torch.testing.assert_close(out["final_state"], state)
    torch.testing.assert_close(
        out["final_key_sum"], k.sum(2) + given.get("initial_key_sum", torch.zeros(()))
    )


@pytest.mark.parametrize("chosen", CHOICES)
def test_backward_is_the_gradient_of_forward(chosen: tuple[int, ...]) -> None:
    of = problem(chosen)
    given = inputs("normal", of, "backward")
    leaves: dict[str, Tensor] = {
        name: given[name].clone().requires_grad_()
        for name in ("q", "k", "v", "initial_state", "initial_key_sum")
        if name in given
    }
    out = definition("forward", leaves, arguments(of, scale=0.5, eps=0.25))
    loss = (out["out"] * given["gout"]).sum()
    for name in ("final_state", "final_key_sum"):
        if f"g{name}" in given:
            loss = loss + (out[name] * given[f"g{name}"]).sum()
    if chosen[4]:
        given["norm"] = out["norm"].detach()
        given["gout_dot_out"] = (given["gout"] * out["out"]).sum(-1).detach()
    got = definition("backward", given, {"scale": 0.5})
    want = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for name, gradient in zip(leaves, want, strict=True):
        wanted = torch.zeros_like(leaves[name]) if gradient is None else gradient
        torch.testing.assert_close(got[f"g{name}"], wanted, rtol=1e-11, atol=1e-11)


class Pair(torch.autograd.Function):
    """The two definitions as one differentiable function, with everything that there may be."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        names = ("q", "k", "v", "initial_state", "initial_key_sum")
        out = definition("forward", dict(zip(names, given, strict=True)),
                         {"scale": 0.5, "eps": 0.25, "return_norm": 1.0})
        ctx.save_for_backward(*given, out["out"], out["norm"])
        return out["out"], out["final_state"], out["final_key_sum"]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        q, k, v, state, keys, out, norm = ctx.saved_tensors
        gout, gstate, gkeys = gradients
        got = definition("backward", {
            "gout": gout, "q": q, "k": k, "v": v, "initial_state": state, "initial_key_sum": keys,
            "norm": norm, "gout_dot_out": (gout * out).sum(-1), "gfinal_state": gstate,
            "gfinal_key_sum": gkeys,
        }, {"scale": 0.5})
        return tuple(got[f"g{n}"] for n in ("q", "k", "v", "initial_state", "initial_key_sum"))


def test_the_pair_passes_gradcheck() -> None:
    given = inputs("normal", problem((1,) * 5, "B=1,H=2,T=4,E=2,M=3"))
    leaves = [x.requires_grad_() for x in given.values()]
    assert torch.autograd.gradcheck(Pair.apply, leaves)


@pytest.mark.parametrize("name", ["q", "k", "v", "gout"])
def test_nan_reaches_only_the_steps_that_depend_on_it(name: str) -> None:
    of = problem((1, 1, 1, 1, 0))
    given = inputs("normal", of, "backward")
    given[name][0, 0, 4] = torch.nan
    backward = definition("backward", given, {"scale": 1.0})
    if name != "gout":
        out = definition("forward", given, arguments(of))["out"]
        assert out[0, 0, :4].isfinite().all()
        assert out[1:].isfinite().all()
        assert out[0, 0, 4].isnan().all()
    later, earlier = backward["gq"], (backward["gk"], backward["gv"])
    assert later[0, 0, :4].isfinite().all()
    assert all(x[0, 0, 5:].isfinite().all() for x in earlier)
    assert any(x.isnan().any() for x in (later, *earlier))


@pytest.mark.parametrize(("case", "pass_name"), EVERY_CASE)
def test_scale_is_the_magnitude_of_what_is_summed(case: str, pass_name: str) -> None:
    of = problem((1,) * 5)
    given = inputs(case, of, pass_name)
    scalars = arguments(of, pass_name)
    outputs = definition(pass_name, given, scalars)
    magnitude = scale(pass_name, given, outputs, scalars)
    magnitudes = {name: x.abs() for name, x in given.items()}
    if pass_name == "backward":
        magnitudes["gout_dot_out"] = -magnitudes["gout_dot_out"]
    terms = definition(pass_name, magnitudes, scalars)
    for name, output in outputs.items():
        finite = output.isfinite() & magnitude[name].isfinite()
        assert finite.any()
        assert (magnitude[name] >= output.abs())[finite].all()
        assert (magnitude[name] <= terms[name] * (1 + 1e-9))[finite].all()


def test_cost_is_of_the_cheapest_form() -> None:
    long = problem(dims="B=8,H=16,T=4096,E=64,M=64")
    assert cost("forward", long).flops == 8 * 16 * 4096 * 2 * 2 * 64 * 64
    assert cost("forward", long).bytes == 4 * 4 * 8 * 16 * 4096 * 64
    assert cost("forward", long).unit == "3xhalf"
    short = problem(dims="B=1,H=1,T=2,E=64,M=64")
    assert cost("forward", short).flops == 2 * 3 * (64 + 64)
    step = problem((1, 0, 1, 0, 0), "B=1,H=1,T=1,E=64,M=32")
    assert cost("forward", step).flops == 2 * 2 * 64 * 32
    assert cost("forward", step).bytes == 4 * (64 + 64 + 32 + 32 + 2 * 64 * 32)


@pytest.mark.parametrize("chosen", [(0, 0, 0, 0, 0), (1, 1, 1, 0, 1), (1, 0, 1, 0, 0)])
@pytest.mark.parametrize("steps", [1, 100])
def test_the_eager_peer_computes_the_same(chosen: tuple[int, ...], steps: int) -> None:
    of = problem(chosen, f"B=1,H=2,T={steps},E=3,M=4")
    forward = {name: x.float() for name, x in inputs("normal", of).items()}
    scalars = arguments(of, scale=0.5)
    made = peers("forward")["eager"](forward, scalars)
    assert isinstance(made, tuple)
    want = definition("forward", forward, scalars)
    torch.testing.assert_close(made[0], want["out"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(made[1], want["final_state"], rtol=1e-4, atol=1e-4)

    backward = {name: x.float() for name, x in inputs("normal", of, "backward").items()}
    if chosen[4]:
        out = definition("forward", backward, scalars)
        backward["norm"] = out["norm"]
        backward["gout_dot_out"] = (backward["gout"] * out["out"]).sum(-1)
    gradients = peers("backward")["eager"](backward, scalars)
    assert isinstance(gradients, tuple)
    wanted = definition("backward", backward, scalars)
    for name, gradient in zip(("gq", "gk", "gv"), gradients, strict=False):
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-3, atol=1e-3)
