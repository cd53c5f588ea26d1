"""The definition of wkv4: the formula, its gradients, states, extreme inputs."""

from __future__ import annotations

import pytest
import references
import torch
from torch import Tensor

from kgen.errors import ProblemError
from kgen.model.problem import Problem, parse_problem
from kgen.operators.wkv4 import OPERATOR

STATES = ",initial_state_dtype=fp32,final_state_dtype=fp32"
NAMES = ("k", "v", "w", "u", "initial_state")
EMPTY = torch.tensor([0.0, 0.0, -1e38], dtype=torch.float64)


def problem(dims: str = "B=2,T=7,C=5", states: bool = True, form: str = "log") -> Problem:
    text = f"{dims},dtype=fp32,decay_form={form}" + STATES * states
    return parse_problem(text, OPERATOR.signature)


def inputs(at: Problem, case: str, pass_name: str = "backward") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = OPERATOR.make_inputs(pass_name, at, case, generator, torch.device("cpu"))
    return {name: x.double() for name, x in made.items()}


def by_the_formula(x: dict[str, Tensor], form: str) -> tuple[Tensor, Tensor]:
    w = -x["w"].exp() if form == "raw" else x["w"]
    return references.wkv4(x["k"], x["v"], w, x["u"], x.get("initial_state"))


def both(x: dict[str, Tensor], form: str = "log") -> dict[str, Tensor]:
    chosen = {f"decay_form={form}": 1.0}
    forward = OPERATOR.definition("forward", x, chosen)
    return forward | OPERATOR.definition("backward", x, chosen)


@pytest.mark.parametrize("form", ["log", "raw"])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize("case", ["normal", "rising", "falling", "no_decay", "large_keys"])
def test_it_is_the_formula_and_its_gradient(
    case: str, steps: int, states: bool, form: str
) -> None:
    given = inputs(problem(f"B=2,T={steps},C=5", states, form), case)
    leaves = {name: given[name].clone().requires_grad_() for name in NAMES if name in given}
    y, state = by_the_formula(leaves, form)
    loss = (y * given["gy"]).sum()
    if states:
        loss = loss + (state * given["gfinal_state"]).sum()
    want = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    made = both(given, form)
    single = both({name: x.float() for name, x in given.items()}, form)
    torch.testing.assert_close(made["y"], y)
    torch.testing.assert_close(made["final_state"], state)
    for name, gradient in zip(leaves, want, strict=True):
        torch.testing.assert_close(made[f"g{name}"], gradient, rtol=1e-9, atol=1e-9)
        assert single[f"g{name}"].dtype == torch.float32
        torch.testing.assert_close(single[f"g{name}"].double(), gradient, rtol=2e-3, atol=2e-3)


def test_a_state_handed_on_is_one_long_call() -> None:
    """The gradient of max comes from the second part alone; the first part needs none."""
    whole = inputs(problem("B=2,T=30,C=5"), "normal")
    want = both(whole)
    parts = [whole | {n: whole[n][:, cut] for n in ("k", "v", "gy")}
             for cut in (slice(0, 11), slice(11, 30))]  # fmt: skip
    middle = OPERATOR.definition("forward", parts[0], {})["final_state"]
    second = both(parts[1] | {"initial_state": middle})
    first = both(parts[0] | {"gfinal_state": second["ginitial_state"]})
    for name in ("y", "gk", "gv"):
        torch.testing.assert_close(torch.cat([first[name], second[name]], 1), want[name])
    for name in ("gw", "gu"):
        torch.testing.assert_close(first[name] + second[name], want[name])
    torch.testing.assert_close(first["ginitial_state"], want["ginitial_state"])
    torch.testing.assert_close(second["final_state"], want["final_state"])


def test_a_loss_of_the_values_of_a_state_agrees_with_the_gradient_of_the_maximum() -> None:
    """As FLA differentiates: the maximum is not a constant, and its gradient cancels."""
    given = inputs(problem("B=2,T=9,C=5"), "normal")
    leaves = {name: given[name].clone().requires_grad_() for name in NAMES}
    num, den, top = leaves["initial_state"].unbind(-1)
    for k_t, v_t in zip(leaves["k"].unbind(1), leaves["v"].unbind(1), strict=True):
        largest = torch.maximum(top + leaves["w"], k_t)
        old, new = (top + leaves["w"] - largest).exp(), (k_t - largest).exp()
        num, den, top = old * num + new * v_t, old * den + new, largest
    state = torch.stack([num, den, top], dim=-1)
    num, den, top = state.unbind(-1)
    loss = (num / den).sin().sum() + (den.log() + top).square().sum()
    want = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True)
    (by_state,) = torch.autograd.grad(loss, state)
    given["gy"] = torch.zeros_like(given["gy"])
    made = OPERATOR.definition("backward", given | {"gfinal_state": by_state}, {})
    for name, gradient in zip(leaves, want, strict=True):
        expected = torch.zeros_like(leaves[name]) if gradient is None else gradient
        torch.testing.assert_close(made[f"g{name}"], expected, rtol=1e-9, atol=1e-9)


def test_no_steps_hand_the_state_on() -> None:
    given = inputs(problem("B=2,T=0,C=5"), "normal")
    made = both(given)
    torch.testing.assert_close(made["final_state"], given["initial_state"])
    state, by_state = given["initial_state"], given["gfinal_state"]
    num, den = by_state[..., 0], by_state[..., 1]
    torch.testing.assert_close(made["ginitial_state"][..., :2], by_state[..., :2])
    by_max = state[..., 0] * num + state[..., 1] * den
    torch.testing.assert_close(made["ginitial_state"][..., 2], by_max)
    del given["initial_state"]
    empty = OPERATOR.definition("forward", given, {})["final_state"]
    assert empty.equal(EMPTY.expand(2, 5, 3))


def test_a_decay_of_zero_forgets() -> None:
    given = inputs(problem("B=1,T=9,C=2"), "normal")
    given["w"] = torch.tensor([-torch.inf, 0.0]).double()
    made = both(given)
    last = torch.stack([given["v"][:, -1], torch.ones(1, 2), given["k"][:, -1]], dim=-1)
    assert made["final_state"][:, 0].equal(last[:, 0])
    assert made["gw"][0] == 0
    assert all(x.isfinite().all() for x in made.values())
    raw = given | {"w": torch.tensor([torch.inf, -torch.inf]).double()}
    for name, x in both(raw, "raw").items():
        torch.testing.assert_close(x, made[name] if name != "gw" else torch.zeros_like(x))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 37])
@pytest.mark.parametrize("case", ["normal", "large_keys", "extreme_decay", "nonfinite"])
def test_float64_sums_by_doubling_what_fp32_sums_step_by_step(case: str, steps: int) -> None:
    given = inputs(problem(f"B=2,T={steps},C=5"), case)
    double, single = both(given), both({name: x.float() for name, x in given.items()})
    for name, want in double.items():
        torch.testing.assert_close(
            single[name].double(), want, rtol=2e-3, atol=2e-3, equal_nan=True)


def test_a_max_that_is_nan_stays() -> None:
    """As in a kernel that takes the larger of it and a key by a comparison."""
    given = inputs(problem(), "normal")
    given["initial_state"][1, 3, 2] = torch.nan
    made = both(given)
    assert made["final_state"][1, 3].isnan().all()
    assert made["y"][1, :, 3].isnan().all()
    assert made["ginitial_state"][1, 3].isnan().all()
    others = torch.ones(5, dtype=torch.bool)
    others[3] = False
    assert made["final_state"][:, others].isfinite().all()


@pytest.mark.parametrize("steps", [1, 6])
def test_terms_of_a_state_count_with_their_exponents(steps: int) -> None:
    """Later steps add 0 to the state, so its only error is the rounding of the exponent."""
    given = inputs(problem(f"B=1,T={steps},C=5", states=False), "normal", "forward")
    given["w"] = torch.full_like(given["w"], -8.0)
    given["k"] = torch.zeros_like(given["k"])
    given["v"][:, 1:] = 0.0
    made = OPERATOR.definition("forward", given, {})
    assert OPERATOR.scale is not None
    scale = OPERATOR.scale("forward", given, made, {})["final_state"][..., 0]
    exponent = 8.0 * (steps - 1)
    torch.testing.assert_close(scale, (1 + exponent) * made["final_state"][..., 0].abs())


@pytest.mark.parametrize("name", ["k", "v", "gy"])
def test_nan_reaches_what_depends_on_it_alone(name: str) -> None:
    given = inputs(problem(), "normal")
    given[name][0, 4, 2] = torch.nan
    made = both(given)
    others = torch.ones(5, dtype=torch.bool)
    others[2] = False
    for found, x in made.items():
        channels = x[..., others, :] if found.endswith("state") else x[..., others]
        assert channels.isfinite().all(), found
    assert made["gk"][0, :4, 2].isnan().all()
    if name == "gy":
        assert made["gk"][0, 5:, 2].isfinite().all()
    else:
        assert made["y"][0, :4, 2].isfinite().all()
        assert made["y"][0, 4:, 2].isnan().all()
        assert made["final_state"][0, 2, :2].isnan()[0]
        assert made["final_state"][0, 2, 2].isfinite()


@pytest.mark.parametrize("case", OPERATOR.cases)
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_scale_is_at_least_the_output_and_of_y_at_most_the_values(
    case: str, pass_name: str
) -> None:
    at = problem("B=2,T=30,C=5")
    given, scalars = inputs(at, case, pass_name), OPERATOR.arguments(pass_name, at)
    outputs = OPERATOR.definition(pass_name, given, scalars)
    assert OPERATOR.scale is not None
    scale = OPERATOR.scale(pass_name, given, outputs, scalars)
    for name, output in outputs.items():
        finite = output.isfinite() & scale[name].isfinite()
        assert finite.any() or case == "nonfinite"
        assert (scale[name] >= output.abs())[finite].all()
        if name == "y":  # a mean
            most = given["v"].nan_to_num(0, 0, 0).abs().amax(1, keepdim=True)
            state = given["initial_state"]
            before = torch.where(state[..., 1] > 0, state[..., 0] / state[..., 1], 0.0).abs()
            limit = torch.maximum(most, before[:, None]).expand_as(output)
            assert (scale[name] <= 1.001 * limit)[finite].all()


def test_an_extent_that_is_fixed() -> None:
    assert problem().shape(("B", "C", "3")) == (2, 5, 3)
    with pytest.raises(ProblemError, match=r"decay_form=decay.*\n.*log, raw"):
        problem(form="decay")
