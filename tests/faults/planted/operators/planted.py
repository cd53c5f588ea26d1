"""An operator whose kernels carry planted faults: rows reversed, plus their sums, times a gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """y[m, n] = gain (x[m, N-1-n] + sum_n x[m, n])."""
    x = inputs["x"]
    return {"y": scalars["gain"] * (x.flip(-1) + x.sum(dim=-1, keepdim=True))}


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw x."""
    import torch

    return {"x": torch.randn(problem.shape(("M", "N")), generator=generator, device=device)}


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The scale of errors: the sum of the absolute values that are added."""
    x = inputs["x"].abs()
    return {"y": abs(scalars["gain"]) * (x.flip(-1) + x.sum(dim=-1, keepdim=True))}


def cost(pass_name: str, problem: Problem) -> Cost:
    """Read x, write y."""
    m, n = problem.shape(("M", "N"))
    return Cost(bytes=8 * m * n, flops=2 * m * n)


def peers(pass_name: str) -> dict[str, Callable[[Tensors, Mapping[str, float]], object]]:
    """Eager PyTorch."""
    return {"eager": lambda inputs, scalars: definition(pass_name, inputs, scalars)}


OPERATOR = Operator(
    name="planted",
    summary="Rows reversed, plus their sums; with planted faults.",
    source="kgen's own tests.",
    doc="y[m, n] = gain (x[m, N-1-n] + sum_n x[m, n])",
    signature=Signature(
        dims=(Dim("M", "rows"), Dim("N", "columns", smallest=1)),
        dtypes=(DTypeField("dtype", ("fp32",), default="fp32"),),
        passes=(
            Pass(
                "forward",
                inputs=(Tensor("x", ("M", "N"), free_strides=("M",), doc="fp32."),),
                outputs=(Tensor("y", ("M", "N"), doc="fp32."),),
                scalars=(Scalar("gain", 1.0, doc="Factor of y."),),
            ),
        ),
    ),
    definition=definition,
    make_inputs=make_inputs,
    cases=(),
    cost=cost,
    problems={"cuda": ("M=9,N=64",), "host": ("M=9,N=64",)},
    peers=peers,
    scale=scale,
    slab_dim="M",
)
