"""Softmax over rows: the worked example of docs/tutorials/new-operator.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Signature, Tensor
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """y[m, n] = exp(x[m, n]) / sum_n exp(x[m, n])."""
    return {"y": inputs["x"].softmax(dim=-1)}


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw x; `peaked` makes one element of every row dominate, `shifted` needs the maximum, of
    rows far above 0 and far below it."""
    import torch

    dtype = getattr(torch, problem.dtype("dtype").torch)
    x = torch.randn(problem.shape(("M", "N")), generator=generator, device=device, dtype=dtype)
    if case == "peaked":
        x[:, 0] += 20.0
    elif case == "shifted":
        x[::2] += 300.0
        x[1::2] -= 300.0
    return {"x": x}


def cost(pass_name: str, problem: Problem) -> Cost:
    """Read x, write y; a maximum, a subtraction, an exponential, a sum and a product."""
    m, n = problem.shape(("M", "N"))
    return Cost(bytes=2 * m * n * problem.dtype("dtype").itemsize, flops=5 * m * n)


def peers(pass_name: str) -> dict[str, Callable[[Tensors, Mapping[str, float]], object]]:
    """Eager PyTorch."""
    return {"eager": lambda inputs, scalars: inputs["x"].softmax(dim=-1)}


OPERATOR = Operator(
    name="softmax",
    summary="Softmax over the last dim.",
    source="Bridle 1990.",
    doc="y[m, n] = exp(x[m, n]) / sum_n exp(x[m, n])",
    signature=Signature(
        dims=(Dim("M", "rows"), Dim("N", "columns", smallest=1)),
        dtypes=(DTypeField("dtype", ("fp32", "fp16", "bf16")),),
        passes=(
            Pass(
                "forward",
                inputs=(Tensor("x", ("M", "N"), free_strides=("M",), flatten_leading=True,
                               doc="fp32, fp16 or bf16; N contiguous, any row stride."),),
                outputs=(Tensor("y", ("M", "N"), flatten_leading=True,
                                doc="dtype of x; contiguous."),),
            ),
        ),
    ),
    definition=definition,
    make_inputs=make_inputs,
    cases=("peaked", "shifted"),
    cost=cost,
    problems={
        "cuda": ("M=8192,N=4096,dtype=bf16",),
        "host": ("M=64,N=256,dtype=fp32",),
    },
    peers=peers,
    slab_dim="M",
)
