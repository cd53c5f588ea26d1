"""Gradients of rmsnorm: against autograd, and against differences of the forward kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.launch.host import HostDevice
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.plan import make_plan
from kgen.model.problem import Problem, parse_problem
from kgen.operators.rmsnorm import OPERATOR, definition, make_inputs, scale
from kgen.search.feasible import enumerate_feasible

ENTRY = open_catalogue().entry("rmsnorm")
HOST = profile_named("host")
SCALARS = {"eps": 1e-3, "offset": 1.0}
BACKWARD = [v.name for v in ENTRY.space.of_pass("backward")]


def draw(problem: Problem, pass_name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return make_inputs(pass_name, problem, "normal", generator, torch.device("cpu"))


@pytest.mark.parametrize("weight", ["fp32", "none"])
@pytest.mark.parametrize("residual", ["none", "fp32"])
@pytest.mark.parametrize("saved", ["none", "fp32"])
def test_definitions_agree_with_autograd(weight: str, residual: str, saved: str) -> None:
    problem = parse_problem(
        f"M=5,N=7,dtype=fp32,w_dtype={weight},residual_dtype={residual},rstd_dtype={saved}",
        OPERATOR.signature,
    )
    given = {name: t.double() for name, t in draw(problem, "backward").items()}
    h = given["x"].clone().requires_grad_()
    leaves = [h]
    inputs = {"x": h}
    if "w" in given:
        inputs["w"] = given["w"].clone().requires_grad_()
        leaves.append(inputs["w"])
    out = definition("forward", inputs, SCALARS)
    if "rstd" in given:
        given["rstd"] = out["rstd"].detach()
    loss = (out["y"] * given["dy"]).sum()
    if "dh" in given:
        loss = loss + (out["h"] * given["dh"]).sum()
    want = torch.autograd.grad(loss, leaves)
    got = definition("backward", given, SCALARS)
    assert set(got) == ({"dx", "dw"} if weight != "none" else {"dx"})
    for name, gradient in zip(("dx", "dw"), want, strict=False):
        torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-12)


class Pair(torch.autograd.Function):
    """The two definitions as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        out = definition("forward", {"x": x, "w": w, "residual": residual}, SCALARS)
        ctx.save_for_backward(out["h"], w, out["rstd"])
        return out["y"], out["h"]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, w, rstd = ctx.saved_tensors
        dy, dh = gradients
        got = definition("backward", {"dy": dy, "x": h, "w": w, "rstd": rstd, "dh": dh}, SCALARS)
        return got["dx"], got["dw"], got["dx"]


def test_the_pair_passes_gradcheck() -> None:
    shapes = ((4, 6), (6,), (4, 6))
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(Pair.apply, inputs)


def run(pass_name: str, variant_name: str, problem: Problem, inputs: Mapping[str, Tensor],
        compiler: Any) -> dict[str, Tensor]:
    """Run a variant's first feasible config on the host layer."""
    variant = ENTRY.space.variant(pass_name, variant_name)
    whole = OPERATOR.signature.pass_named(pass_name)
    config = enumerate_feasible([variant], whole, problem, HOST).configs[0]
    renderer = Renderer(include_dir())
    rendered = renderer.render("rmsnorm", ENTRY.templates, variant, config, problem)
    (built,) = compiler.build([BuildRequest(rendered, "host")])
    assert isinstance(built, Artifact), built
    plan = make_plan(variant, config, problem, HOST)
    outputs = {t.name: torch.empty(problem.shape(t.dims))
               for t in problem.present(whole).outputs}
    tensors: dict[str, Tensor | None] = {t.name: None for t in whole.tensors}
    tensors |= inputs
    tensors |= outputs
    tensors |= {w.name: torch.empty(w.elements) for w in plan.workspaces}
    numbers: dict[str, int | float] = {**SCALARS, **dict(problem.dims)}
    for t in whole.inputs:
        numbers |= {f"{t.name}_stride_{d}": problem.dim("N") for d in t.free_strides}
    HostDevice().load(built).bind(plan, tensors, numbers)()
    return outputs


@pytest.mark.parametrize("variant", BACKWARD)
def test_kernels_agree_with_differences_of_the_forward_kernel(variant: str) -> None:
    """d/dt L(p + t v) at 0 for L = <dy, y> + <dh, h>, all of x, residual and w moved at once.

    The bound has no free constant: the error of the central difference itself is computed in
    float64 on the same points, and what both kernels may round is a few ulp of each term.
    """
    text = "M=8,N=256,dtype=fp32,residual_dtype=fp32"
    problem = parse_problem(text, OPERATOR.signature)
    base = draw(problem, "forward")
    gradients = {name: t for name, t in draw(problem, "backward").items() if name in ("dy", "dh")}
    step = 1e-2
    generator = torch.Generator().manual_seed(4)
    moved: list[dict[str, Tensor]] = [{}, {}]
    direction: dict[str, Tensor] = {}
    for name, value in base.items():
        step_of = torch.randn(value.shape, generator=generator)
        for side, sign in enumerate((1.0, -1.0)):
            moved[side][name] = value + sign * step * step_of
        # As rounded: the direction in which the points really lie.
        direction[name] = (moved[0][name].double() - moved[1][name].double()) / (2 * step)

    def loss(out: Mapping[str, Tensor]) -> tuple[float, float]:
        """L, and the sum of its terms' magnitudes."""
        terms = [out[o].double() * gradients[g].double() for o, g in (("y", "dy"), ("h", "dh"))]
        return sum(float(t.sum()) for t in terms), sum(float(t.abs().sum()) for t in terms)

    compiler = open_compiler("host", [include_dir()])
    kernel = [loss(run("forward", "naive", problem, m, compiler)) for m in moved]
    exact = [loss(definition("forward", {n: t.double() for n, t in m.items()}, SCALARS))
             for m in moved]
    backward = {"x": base["x"] + base["residual"], "w": base["w"], **gradients}
    got = run("backward", variant, problem, backward, compiler)
    compiler.close()
    wide = {name: t.double() for name, t in backward.items()}
    want = definition("backward", wide, SCALARS)

    def along(gradient: Mapping[str, Tensor]) -> float:
        both = direction["x"] + direction["residual"]
        return float((gradient["dx"].double() * both).sum()
                     + (gradient["dw"].double() * direction["w"]).sum())

    difference = (kernel[0][0] - kernel[1][0]) / (2 * step)
    truncation = abs((exact[0][0] - exact[1][0]) / (2 * step) - along(want))
    ulps = 8 * torch.finfo(torch.float32).eps
    magnitudes = scale("backward", wide, want, SCALARS)
    rounding = ulps * (kernel[0][1] + kernel[1][1]) / (2 * step)
    moves = {"dx": direction["x"] + direction["residual"], "dw": direction["w"]}
    rounding += ulps * sum(float((magnitudes[n] * moves[n].abs()).sum()) for n in moves)
    bound = truncation + rounding
    assert abs(difference - along(got)) <= bound
    assert bound < 0.05 * float(direction["x"].norm()), "a bound this wide would say nothing"
