"""RMSNorm: scale each row to unit root mean square, times a weight; with residual and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.operators._rmsnorm_peers import peers
from kgen.operators._shared import case_factor, moved_bytes
from kgen.operators.base import Cost, Gradients, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

EPS = 1e-6

_W = Tensor(
    "w", ("N",), dtype="w_dtype",
    doc="dtype of x, or fp32; None: a weight of 1, and offset is ignored.",
)
_SCALARS = (
    Scalar("eps", EPS, above=0.0, doc="Added to the mean square; > 0."),
    Scalar("offset", 0.0, doc="Added to the weight: 1 where a model stores w - 1, as Gemma does."),
)


def _rows(name: str, doc: str, dtype: str = "dtype") -> Tensor:
    """An input of M rows whose stride the caller chooses."""
    return Tensor(
        name, ("M", "N"), dtype=dtype, free_strides=("M",), flatten_leading=True, doc=doc
    )


def _result(name: str, doc: str, dtype: str = "dtype") -> Tensor:
    """An output of M rows."""
    return Tensor(name, ("M", "N"), dtype=dtype, flatten_leading=True, doc=doc)


def _rstd(doc: str) -> Tensor:
    """One number per row."""
    return Tensor("rstd", ("M",), dtype="rstd_dtype", flatten_leading=True, doc=doc)


SIGNATURE = Signature(
    dims=(Dim("M", "rows"), Dim("N", "columns", smallest=1)),
    dtypes=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("w_dtype", ("dtype", "fp32", "none"), default="dtype"),
        DTypeField("residual_dtype", ("none", "dtype"), default="none"),
        DTypeField("rstd_dtype", ("none", "fp32"), default="none"),
    ),
    passes=(
        Pass(
            "forward",
            inputs=(
                _rows("x", "fp32, fp16 or bf16; N contiguous, any row stride."),
                _W,
                _rows("residual", "dtype of x; added to x first.", "residual_dtype"),
            ),
            outputs=(
                _result("y", "dtype of x; contiguous."),
                _result("h", "x + residual, rounded to their dtype.", "residual_dtype"),
                _rstd("fp32; 1 / sqrt(mean + eps) of each row, for the backward pass."),
            ),
            scalars=_SCALARS,
        ),
        Pass(
            "backward",
            inputs=(
                _rows("dy", "gradient of y; dtype of x."),
                _rows("x", "the normalised tensor: x, or h if there was a residual."),
                _W,
                _rstd("fp32, as the forward pass returns it; None to compute it again."),
                _rows("dh", "gradient of h, added to dx.", "residual_dtype"),
            ),
            outputs=(
                _result("dx", "gradient of x, and of the residual; dtype of x."),
                Tensor("dw", ("N",), dtype="w_dtype", doc="gradient and dtype of w."),
            ),
            scalars=_SCALARS,
        ),
    ),
)


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The formulas of the operator's `doc`, evaluated literally."""
    if pass_name == "backward":
        return _gradients(inputs, scalars)
    x = inputs["x"]
    if "residual" in inputs:
        x = x + inputs["residual"]
    y = x * (x.square().mean(dim=-1, keepdim=True) + scalars["eps"]).rsqrt()
    if "w" in inputs:
        y = y * (scalars["offset"] + inputs["w"])
    return {"y": y.to(x.dtype), "h": x, "rstd": _wide_rstd(x, scalars["eps"])}


def _wide_rstd(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean + eps) of each row, in fp32 or wider, as models save it."""
    import torch

    wide = x if x.dtype == torch.float64 else x.float()
    return (wide.square().mean(dim=-1) + eps).rsqrt()


def _normalised(inputs: Tensors, scalars: Mapping[str, float]) -> tuple[torch.Tensor, ...]:
    """(rstd as a column, xhat, g) of the backward pass."""
    x, dy = inputs["x"], inputs["dy"]
    if "rstd" in inputs:
        rstd = inputs["rstd"].unsqueeze(-1)
    else:
        rstd = (x.square().mean(dim=-1, keepdim=True) + scalars["eps"]).rsqrt()
    g = dy * (scalars["offset"] + inputs["w"]) if "w" in inputs else dy
    return rstd, x * rstd, g


def _gradients(inputs: Tensors, scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
    rstd, xhat, g = _normalised(inputs, scalars)
    dx = rstd * (g - xhat * (g * xhat).mean(dim=-1, keepdim=True))
    if "dh" in inputs:
        dx = dx + inputs["dh"]
    found = {"dx": dx.to(inputs["x"].dtype)}
    if "w" in inputs:
        found["dw"] = (inputs["dy"] * xhat).sum(dim=0).to(inputs["w"].dtype)
    return found


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw the inputs; the case decides scale and special values of x.

    `tiny` and `huge` scale x by 1e-4 and 1e4 (fp16: by 1e2, and w so that some of y overflows).
    `nonfinite` plants one NaN, one Inf and one -Inf in x, and in w a NaN whose bits are all ones
    (as a GPU's arithmetic produces; a faulty rounding carries it over to 0). `zero_rows` zeroes
    every third row (only eps keeps the result finite). `offset` adds 100 to every element, so that
    the mean square is much larger than the variance. `uneven_rows` has rows whose mean square is
    far below eps, and rows with one element 256 times as large, in x and in what is added to it.
    """
    import torch

    shape = problem.shape(("M", "N"))
    m, n = shape
    x_dtype = getattr(torch, problem.dtype("dtype").torch)

    def rows() -> torch.Tensor:
        # Drawn in x's dtype: at 2^30 elements an fp32 copy would take gigabytes.
        return torch.randn(shape, generator=generator, device=device, dtype=x_dtype)

    x = rows()
    if case in ("tiny", "huge"):
        x *= case_factor(case, x_dtype)
    elif case == "offset":
        x += 100.0
    elif case == "zero_rows":
        x[::3] = 0.0
    elif case == "uneven_rows":
        _make_uneven(x)
    elif case == "nonfinite" and m:
        x[0, 1::5] = 0.0  # 0 * NaN is NaN
        x[0, 0] = float("nan")
        x[m // 2, n // 2] = float("inf")
        x[m - 1, n - 1] = float("-inf")
    inputs = {"x": x}
    if problem.dtype("w_dtype").itemsize:
        w = torch.randn(n, generator=generator, device=device, dtype=torch.float32) * 0.5 + 1.0
        if pass_name == "forward":  # in the backward pass one NaN in w would make all of dx NaN
            w = _hard_weight(w, case, problem)
        inputs["w"] = w.to(getattr(torch, problem.dtype("w_dtype").torch))
    if pass_name == "backward":
        inputs["dy"] = rows()
        if problem.dtype("rstd_dtype").itemsize:
            inputs["rstd"] = _wide_rstd(x, EPS)
    if problem.dtype("residual_dtype").itemsize:
        added = "dh" if pass_name == "backward" else "residual"
        inputs[added] = rows()
        if case == "zero_rows":
            inputs[added][::3] = 0.0
        if case == "nonfinite":
            inputs[added][:1, 1::5] = 0.0
        if case == "uneven_rows" and added == "residual":
            _make_uneven(inputs[added])
    return inputs


def _make_uneven(rows: torch.Tensor) -> None:
    rows[1::3] *= 1e-6
    rows[2::3, rows.shape[1] // 3] *= 256


def _hard_weight(w: torch.Tensor, case: str, problem: Problem) -> torch.Tensor:
    import torch

    if case == "huge" and problem.dtype("dtype").name == "fp16":
        return w * 2e4
    if case == "nonfinite" and w.numel() > 2:  # only this column becomes NaN
        w[w.numel() // 3] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    return w


def trained(
    pass_name: str, problem: Problem, inputs: Tensors, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """x, the residual and rstd with outlier channels and massive activations.

    One channel in 512 is 20 to 100 times as large in every row: outlier features, Dettmers et al.
    2022, arXiv:2208.07339. Two channels are 1000 times as large in one row of 512, that of a first
    token: massive activations, Sun et al. 2024, arXiv:2402.17762 (in LLaMA2-7B the channels 1415
    and 2533). Their frequency is assumed; the papers count them for some models.
    """
    import torch

    x = inputs["x"]
    rows, columns = x.shape
    factor = torch.ones(columns, device=x.device)
    outliers = factor[columns // 3 :: 512]
    uniform = torch.rand(outliers.shape, generator=generator, device=x.device)
    outliers.copy_(20 + 80 * uniform)
    found = {"x": x * factor.to(x.dtype)}
    for column in (columns // 4, columns - columns // 4 - 1):
        found["x"][: rows : 512, column] = 1000.0
    if "rstd" in inputs:
        found["rstd"] = _wide_rstd(found["x"], EPS)
    if "residual" in inputs:
        found["residual"] = inputs["residual"] * factor.to(x.dtype)
    return found


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The magnitude to which errors are relative.

    Forward: the element itself, because nothing cancels after the sum. Terms of gradients cancel:
    so for dx it is the sum of the terms' magnitudes, and for dw the root of the sum of the terms'
    squares, the size of a sum of independent terms.
    """
    if pass_name == "forward":
        return {name: output.abs() for name, output in outputs.items()}
    rstd, xhat, g = _normalised(inputs, scalars)
    terms = g.abs() + xhat.abs() * (g * xhat).abs().mean(dim=-1, keepdim=True)
    scales = {"dx": rstd * terms}
    if "dh" in inputs:
        scales["dx"] = scales["dx"] + inputs["dh"].abs()
    if "w" in inputs:
        scales["dw"] = (inputs["dy"] * xhat).square().sum(dim=0).sqrt()
    return scales


def cost(pass_name: str, problem: Problem) -> Cost:
    """Read and write each tensor once.

    Operations per element. Forward: a square and an add, two multiplies. Backward: the same sum
    unless rstd is given, dy * w, a multiply-add each for the row's sum and for dw, xhat, and four
    for dx. One more for a residual or its gradient.
    """
    m, n = problem.shape(("M", "N"))
    fields = ("w_dtype", "residual_dtype", "rstd_dtype")
    weighted, added, saved = (bool(problem.dtype(field).itemsize) for field in fields)
    if pass_name == "forward":
        flops = 3 + weighted + added
    else:
        flops = (0 if saved else 2) + 7 + 3 * weighted + added
    moved = moved_bytes(SIGNATURE.pass_named(pass_name), problem)
    return Cost(bytes=moved, flops=flops * m * n)


DOC = """\
h = x + residual;  rstd[m] = 1 / sqrt(mean_n(h[m, n]^2) + eps)
y[m, n] = h[m, n] * rstd[m] * (offset + w[n])

Gradients, with xhat = x * rstd and g = dy * (offset + w):
dx[m, n] = rstd[m] * (g[m, n] - xhat[m, n] * mean_n(g[m, n] * xhat[m, n])) + dh[m, n]
dw[n] = sum_m dy[m, n] * xhat[m, n], always in the same order"""

OPERATOR = Operator(
    name="rmsnorm",
    summary="Root-mean-square normalisation of rows, times a weight.",
    source="Zhang and Sennrich 2019, arXiv:1910.07467.",
    doc=DOC,
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=("tiny", "huge", "offset", "zero_rows", "uneven_rows", "nonfinite"),
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
            "M=32768,N=8192,dtype=bf16,rstd_dtype=fp32",
            "M=64,N=4096,dtype=bf16,residual_dtype=bf16",
            "M=32768,N=8192,dtype=bf16,residual_dtype=bf16",
            "M=32768,N=8192,dtype=bf16,residual_dtype=bf16,rstd_dtype=fp32",
            "M=8191,N=5003,dtype=bf16,residual_dtype=bf16",
        ),
        "cuda backward": (
            "M=8192,N=4096,dtype=bf16",
            "M=32768,N=8192,dtype=bf16",
            "M=4096,N=32768,dtype=bf16",
            "M=1048576,N=128,dtype=bf16",
            "M=8191,N=5003,dtype=bf16",
            "M=32768,N=4096,dtype=fp32",
            "M=32768,N=8192,dtype=bf16,rstd_dtype=fp32",
            "M=512,N=262144,dtype=bf16",
            "M=32768,N=8192,dtype=bf16,residual_dtype=bf16,rstd_dtype=fp32",
        ),
        "host": (
            "M=64,N=256,dtype=fp32",
            "M=61,N=509,dtype=bf16,residual_dtype=bf16,rstd_dtype=fp32",
        ),
    },
    peers=peers,
    # The residual is added to x, and their sum is normalised.
    gradients=Gradients(saved={"x": ("h", "x")}, shared={"residual": "dx"}),
    scale=scale,
    slab_dim="M",
    trained=trained,
)
