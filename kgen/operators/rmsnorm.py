"""RMSNorm: scale each row to unit root mean square, times a weight."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

EPS = 1e-6

SIGNATURE = Signature(
    dims=(Dim("M", "rows"), Dim("N", "columns", smallest=1)),
    dtypes=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("w_dtype", ("dtype", "fp32"), default="dtype"),
    ),
    passes=(
        Pass(
            "forward",
            inputs=(
                Tensor(
                    "x",
                    ("M", "N"),
                    free_strides=("M",),
                    flatten_leading=True,
                    doc="fp32, fp16 or bf16; N contiguous, any row stride.",
                ),
                Tensor("w", ("N",), dtype="w_dtype", doc="dtype of x, or fp32."),
            ),
            outputs=(Tensor("y", ("M", "N"), flatten_leading=True, doc="dtype of x; contiguous."),),
            scalars=(Scalar("eps", EPS, above=0.0, doc="Added to the mean square; > 0."),),
        ),
    ),
)


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """y[m, n] = x[m, n] * w[n] / sqrt(mean_n(x[m, n]^2) + eps)."""
    x, w = inputs["x"], inputs["w"]
    mean_square = x.square().mean(dim=-1, keepdim=True)
    y = x * (mean_square + scalars["eps"]).rsqrt() * w
    return {"y": y.to(x.dtype)}


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw x and w; the case decides scale and special values.

    `tiny` and `huge` scale x by 1e-4 and 1e4 (fp16: by 1e2, and w so that some of y overflows),
    `nonfinite` plants one NaN, one Inf and one -Inf in x, and in w a NaN of all ones (what a
    GPU's arithmetic makes; a careless rounding carries it over to 0), `zero_rows` zeroes every
    third row (eps alone keeps the result finite), and `offset` adds 100 to every element, so that
    the mean square dwarfs the variance.
    """
    import torch

    m, n = problem.shape(("M", "N"))
    x_dtype = getattr(torch, problem.dtype("dtype").torch)
    w_dtype = getattr(torch, problem.dtype("w_dtype").torch)
    # Drawn in x's own dtype: at 2^30 elements a detour through fp32 costs gigabytes.
    x = torch.randn(m, n, generator=generator, device=device, dtype=x_dtype)
    w = torch.randn(n, generator=generator, device=device, dtype=torch.float32) * 0.5 + 1.0
    if case == "tiny":
        x *= 1e-4
    elif case == "huge":
        if problem.dtype("dtype").name == "fp16":
            x *= 1e2
            w *= 2e4
        else:
            x *= 1e4
    elif case == "offset":
        x += 100.0
    elif case == "zero_rows":
        x[::3] = 0.0
    elif case == "nonfinite" and m:
        x[0, 0] = float("nan")
        x[m // 2, n // 2] = float("inf")
        x[m - 1, n - 1] = float("-inf")
        if n > 2:  # its whole column is NaN: leave the others to tell of x
            w[n // 3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    return {"x": x, "w": w.to(w_dtype)}


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Errors are relative to the element itself: no cancellation happens after the sum."""
    return {"y": outputs["y"].abs()}


def cost(pass_name: str, problem: Problem) -> Cost:
    """Read x and w, write y; a square, an add, and two multiplies per element."""
    m, n = problem.shape(("M", "N"))
    itemsize = problem.dtype("dtype").itemsize
    return Cost(bytes=2 * m * n * itemsize + n * problem.dtype("w_dtype").itemsize, flops=4 * m * n)


def peers(pass_name: str) -> dict[str, Callable[[Tensors, Mapping[str, float]], object]]:
    """F.rms_norm, torch.compile of the definition as a model would write it, and Liger's kernel
    where it is installed."""
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    def eager(inputs: Tensors, scalars: Mapping[str, float]) -> object:
        x, w = inputs["x"], inputs["w"]
        return F.rms_norm(x, (x.shape[-1],), w.to(x.dtype), scalars["eps"])

    def model_code(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        x32 = x.float()
        return (x32 * (x32.square().mean(-1, keepdim=True) + eps).rsqrt() * w.float()).to(x.dtype)

    # Past a number of recompilations Dynamo gives up and runs a function eagerly, silently: with
    # many problems in one process, the "compiled" peer would be timed as eager.
    torch._dynamo.reset()
    compiled = torch.compile(model_code, dynamic=False)

    def compiled_peer(inputs: Tensors, scalars: Mapping[str, float]) -> object:
        return compiled(inputs["x"], inputs["w"], scalars["eps"])

    found: dict[str, Callable[[Tensors, Mapping[str, float]], object]] = {
        "eager": eager,
        "torch.compile": compiled_peer,
    }
    if torch.cuda.is_available() and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def liger(inputs: Tensors, scalars: Mapping[str, float]) -> object:
            return LigerRMSNormFunction.apply(inputs["x"], inputs["w"], scalars["eps"])

        found["liger"] = liger
    return found


OPERATOR = Operator(
    name="rmsnorm",
    summary="Root-mean-square normalisation of rows, times a weight.",
    source="Zhang and Sennrich 2019, arXiv:1910.07467.",
    doc="y[m, n] = x[m, n] * w[n] / sqrt(mean_n(x[m, n]^2) + eps)",
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=("tiny", "huge", "offset", "zero_rows", "nonfinite"),
    cost=cost,
    problems={
        "cuda": (
            "M=1,N=4096,dtype=bf16",
            "M=64,N=4096,dtype=bf16",
            "M=8192,N=4096,dtype=bf16",
            "M=32768,N=8192,dtype=bf16",
            "M=262144,N=4096,dtype=bf16",
            "M=4096,N=32768,dtype=bf16",
            "M=1048576,N=128,dtype=bf16",
            "M=8191,N=5003,dtype=bf16",
            "M=262144,N=4096,dtype=fp32",
        ),
        "host": (
            "M=256,N=1024,dtype=fp32",
            "M=1024,N=128,dtype=bf16",
            "M=61,N=509,dtype=fp16",
        ),
    },
    peers=peers,
    scale=scale,
    slab_dim="M",
)
