"""The definition of timex: the published formula, its gradients, and what NaN may reach."""

from __future__ import annotations

import pytest
import torch

from kgen.model.problem import parse_problem
from kgen.operators.timex import OPERATOR, definition, make_inputs, scale

B, C, T = 2, 3, 7


def inputs(
    case: str, pass_name: str = "forward", shape: tuple[int, int, int] = (B, C, T)
) -> dict[str, torch.Tensor]:
    b, c, t = shape
    problem = parse_problem(f"B={b},C={c},T={t},dtype=fp32", OPERATOR.signature)
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


def tap_by_tap(
    pass_name: str, given: dict[str, torch.Tensor], eps: float
) -> dict[str, torch.Tensor]:
    """A plain definition with a slice for each tap. It adds in the order of a kernel's thread, and
    adds no zeros."""
    w, k = given["w"], given["k"]
    steps = k.shape[-1]
    if pass_name == "forward":
        out = torch.zeros_like(k)
        for d in range(steps):
            out[..., d:].addcmul_(k[..., : steps - d], w[:, steps - 1 - d, None])
        return {"out": out + eps}
    gout, gw, gk = given["gout"], torch.zeros_like(w), torch.zeros_like(k)
    for d in range(steps):
        gk[..., : steps - d].addcmul_(gout[..., d:], w[:, steps - 1 - d, None])
    for t in range(steps):
        gw[:, steps - 1 - t :] += (gout[..., t, None] * k[..., : t + 1]).sum(0)
    return {"gw": gw, "gk": gk}


def same(found: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor) -> bool:
    """NaN and Inf at the same places; all else within 1e-13 of the magnitude of its terms."""
    finite = want.isfinite()
    specials = torch.equal(found.nan_to_num()[~finite], want.nan_to_num()[~finite])
    near = ((found - want).abs() <= 1e-13 * magnitude)[finite]
    return specials and torch.equal(found.isnan(), want.isnan()) and bool(near.all())


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize("case", ["normal", *OPERATOR.cases])
# A tile is 32 steps: less than one, whole tiles, one step more, a ragged end, one batch, none.
@pytest.mark.parametrize(
    "shape", [(2, 3, 7), (3, 3, 64), (2, 2, 33), (3, 5, 250), (1, 2, 131), (0, 3, 70)]
)
def test_float64_in_tiles_is_the_tap_by_tap_definition(
    pass_name: str, case: str, shape: tuple[int, int, int]
) -> None:
    if case == "nonfinite":  # w, too, early and late; and not where k and gout have theirs
        given = inputs("normal", pass_name, shape)
        steps = shape[-1]
        for i, name in enumerate(sorted(given)):
            given[name][..., (steps // 3 + 5 * i) % steps] = (torch.inf, torch.nan, -torch.inf)[i]
    else:
        given = inputs(case, pass_name, shape)
    scalars = {"eps": 0.5} if pass_name == "forward" else {}
    found = definition(pass_name, given, scalars)
    want = tap_by_tap(pass_name, given, 0.5)
    sizes = {n: x.where(x.isfinite(), 0.0).abs() for n, x in given.items()}
    magnitude = tap_by_tap(pass_name, sizes, 0.5)
    assert found.keys() == want.keys()
    for name, x in found.items():
        assert same(x, want[name], magnitude[name]), name
    for name, x in scale(pass_name, given, found, scalars).items():
        squares = tap_by_tap(pass_name, {n: y.square() for n, y in given.items()}, 0.25)[name]
        assert same(x, want[name].abs().maximum(squares.sqrt()), magnitude[name]), name


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_fp32_adds_one_term_after_the_other(pass_name: str) -> None:
    """The bound is made of what this loses; sums of tiles would lose far less than kernels do."""
    given = {n: x.float() for n, x in inputs("positive", pass_name, (2, 3, 130)).items()}
    found = definition(pass_name, given, {"eps": 0.5} if pass_name == "forward" else {})
    for name, x in tap_by_tap(pass_name, given, 0.5).items():
        assert torch.equal(found[name], x), name


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
