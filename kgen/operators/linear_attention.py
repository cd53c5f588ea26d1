"""Linear attention: the causal dot product without softmax, as a recurrence over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.operators._linear_attention_peers import peers
from kgen.operators._shared import (
    case_factor,
    moved_bytes,
    outer_product_scan,
    reversed_scan,
    root_sum_square_scale,
    running_sum,
    widened,
)
from kgen.operators.base import Cost, Gradients, Operator
from kgen.runtime.signature import Dot

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

_STATE = ("B", "H", "E", "M")
_KEY_SUM = ("B", "H", "E")
_STEP = ("B", "H", "T")


def _rows(name: str, features: str, doc: str, layout_of: str = "") -> Tensor:
    """One row of features per step; the caller chooses the strides of B, H and T."""
    return Tensor(
        name, ("B", "H", "T", features), free_strides=_STEP, layout_of=layout_of, doc=doc
    )


def _wide(name: str, dims: tuple[str, ...], field: str, doc: str) -> Tensor:
    return Tensor(name, dims, dtype=field, doc=doc)


_ANY_LAYOUT = "the last dim contiguous, any strides of B, H and T."
_QKV = (
    _rows("q", "E", f"fp32, fp16 or bf16; {_ANY_LAYOUT}"),
    _rows("k", "E", "dtype of q."),
    _rows("v", "M", "dtype of q."),
)
_INITIAL_STATE = _wide(
    "initial_state", _STATE, "initial_state_dtype", "fp32; S before the first step; None: 0."
)
_INITIAL_KEY_SUM = _wide(
    "initial_key_sum", _KEY_SUM, "initial_key_sum_dtype",
    "fp32; z before the first step; None: 0.",
)

SIGNATURE = Signature(
    dims=(
        Dim("B", "batch"),
        Dim("H", "heads"),
        Dim("T", "time steps"),
        Dim("E", "key features", smallest=1),
        Dim("M", "value features", smallest=1, like="E", both="D"),
    ),
    dtypes=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("product_dtype", ("dtype", "tf32"), default="dtype"),
        DTypeField("initial_state_dtype", ("none", "fp32"), default="none"),
        DTypeField("initial_key_sum_dtype", ("none", "fp32"), default="none"),
        DTypeField("final_state_dtype", ("none", "fp32"), default="none"),
        DTypeField("final_key_sum_dtype", ("none", "fp32"), default="none"),
        DTypeField("norm_dtype", ("none", "fp32"), default="none"),
    ),
    passes=(
        Pass(
            "forward",
            inputs=(*_QKV, _INITIAL_STATE, _INITIAL_KEY_SUM),
            outputs=(
                _rows("out", "M", "dtype and layout of v.", layout_of="v"),
                _wide("final_state", _STATE, "final_state_dtype", "fp32; S after the last step."),
                _wide(
                    "final_key_sum", _KEY_SUM, "final_key_sum_dtype",
                    "fp32; z after the last step.",
                ),
                _wide("norm", _STEP, "norm_dtype", "fp32; what out was divided by."),
            ),
            scalars=(
                Scalar("scale", 1.0, doc="Factor of the products; often E ** -0.5."),
                Scalar("eps", 0.0, doc="Added to the norm."),
            ),
        ),
        Pass(
            "backward",
            inputs=(
                _rows("gout", "M", f"gradient of out; dtype of q; {_ANY_LAYOUT}"),
                *_QKV,
                _INITIAL_STATE,
                _INITIAL_KEY_SUM,
                _wide("norm", _STEP, "norm_dtype", "fp32, as the forward pass returned it."),
                _wide(
                    "gout_dot_out", _STEP, "norm_dtype",
                    "fp32; sum over m of gout * out, with norm.",
                ),
                _wide(
                    "gfinal_state", _STATE, "final_state_dtype", "fp32; gradient of final_state."
                ),
                _wide(
                    "gfinal_key_sum", _KEY_SUM, "final_key_sum_dtype",
                    "fp32; gradient of final_key_sum.",
                ),
            ),
            outputs=(
                _rows("gq", "E", "dtype and layout of q.", layout_of="q"),
                _rows("gk", "E", "dtype and layout of k.", layout_of="k"),
                _rows("gv", "M", "dtype and layout of v.", layout_of="v"),
                _wide(
                    "ginitial_state", _STATE, "initial_state_dtype",
                    "fp32; gradient of initial_state.",
                ),
                _wide(
                    "ginitial_key_sum", _KEY_SUM, "initial_key_sum_dtype",
                    "fp32; gradient of initial_key_sum.",
                ),
            ),
            scalars=(Scalar("scale", 1.0, doc="As in the forward pass."),),
        ),
    ),
)


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The recurrences of the operator's `doc`, in fp32 or wider.

    A step reads no later step, so no mask multiplies a zero by a NaN, and there is no [T, T]
    matrix. fp32 adds one step after the other, as a kernel does: the bound on kernels comes from
    the error of this sum.
    """
    wide = {name: widened(x) for name, x in inputs.items()}
    found = _forward(wide, scalars) if pass_name == "forward" else _backward(wide, scalars["scale"])
    like = {"out": "v", "gq": "q", "gk": "k", "gv": "v"}
    return {n: y.to(inputs[like[n]].dtype) if n in like else y for n, y in found.items()}


def _forward(inputs: Tensors, scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    out, state = outer_product_scan(q, k, v, inputs.get("initial_state"))
    keys, last_keys = running_sum(k, inputs.get("initial_key_sum"))
    out = out * scalars["scale"]
    norm = (q * keys).sum(-1) * scalars["scale"] + scalars["eps"]
    if scalars.get("return_norm"):
        out = out / norm[..., None]
    return {"out": out, "final_state": state, "final_key_sum": last_keys, "norm": norm}


def _backward(inputs: Tensors, scale: float) -> dict[str, torch.Tensor]:
    """One scan forward in time for gq, two scans backward for the other gradients.

    The norm is the output of an additional column of ones in v; its gradient is an additional
    column of gout.
    """
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    g = inputs["gout"] * scale
    if "norm" in inputs:
        norm = inputs["norm"][..., None]
        g_norm = -scale * inputs["gout_dot_out"][..., None] / norm
        g = g / norm
    start, end = inputs.get("initial_state"), inputs.get("gfinal_state")
    gq, _ = outer_product_scan(g, v, k, None if start is None else start.mT)
    gk, _ = reversed_scan(v, g, q, None if end is None else end.mT)
    gv, gstate = reversed_scan(k, q, g, end)
    gkeys = inputs.get("gfinal_key_sum")
    if "norm" in inputs:
        keys, _ = running_sum(k, inputs.get("initial_key_sum"))
        gq = gq + keys * g_norm
        from_end, gkeys = running_sum((q * g_norm).flip(2), gkeys)
        gk = gk + from_end.flip(2)
    elif gkeys is not None:
        gk = gk + gkeys[:, :, None]
    else:
        gkeys = k.new_zeros(k.shape[0], k.shape[1], k.shape[-1])
    return {"gq": gq, "gk": gk, "gv": gv, "ginitial_state": gstate, "ginitial_key_sum": gkeys}


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw the inputs; the case decides their scale, signs and special values.

    q and k shrink as T grows, so that sums over T stay within fp16. With a norm both are positive,
    as feature maps make them; otherwise the norm would pass through zero. In `negative_norm` q and
    norms are below 0. In `wide_norms` the norms of two thirds of the heads are far larger or
    smaller. `tiny` and `huge` scale v and gout by 1e-4 and 1e4 (fp16: 1e2). `positive` makes all
    values positive, so that a bias of the summation accumulates. `alternating` changes the sign of
    v and gout at every step. `nonfinite` plants a NaN in q, v and gout, and in k an Inf (backward:
    a NaN); steps that do not depend on them must stay finite. No other Inf is planted: whether Inf
    - Inf occurs would depend on the order of summation, which differs between algorithms.
    """
    import torch
    import torch.nn.functional as F  # noqa: N812 - torch's own custom

    b, h, t, e, m = problem.shape(("B", "H", "T", "E", "M"))
    dtype = getattr(torch, problem.dtype("dtype").torch)
    normed = problem.dtype("norm_dtype").itemsize > 0

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    drawn: dict[str, torch.Tensor] = {}
    for name in ("q", "k"):
        x = draw(b, h, t, e)
        if case == "positive":
            x = x.abs()
        elif normed:
            x = F.elu(x) + 1
        if case == "negative_norm" and name == "q":
            x = -64 * x.abs()  # far below any eps
        drawn[name] = (x / max(t, 1) ** 0.25).to(dtype)
    sign = 1 - 2 * (torch.arange(t, device=device) % 2).view(t, 1)
    for name in ("v",) if pass_name == "forward" else ("v", "gout"):
        x = draw(b, h, t, m)
        if case in ("positive", "alternating"):
            x = x.abs()
        if case == "alternating":
            x = x * sign
        if case == "negative_norm":
            x = x / 64  # sums stay within fp16
        drawn[name] = (x * case_factor(case, dtype)).to(dtype)
    if case == "nonfinite" and b * h * t:
        drawn["q"][b // 2, h // 2, t - 1, e - 1] = float("nan")
        drawn["v"][0, 0, t // 2, m // 2] = float("nan")
        drawn["k"][b - 1, h - 1, t // 3, e // 2] = float("inf" if pass_name == "forward" else "nan")
        if "gout" in drawn:
            drawn["gout"][0, h - 1, t // 3, 0] = float("nan")
    wide = {
        "initial_state": ("initial_state_dtype", (b, h, e, m)),
        "initial_key_sum": ("initial_key_sum_dtype", (b, h, e)),
    }
    if pass_name == "backward":
        wide |= {
            "norm": ("norm_dtype", (b, h, t)),
            "gout_dot_out": ("norm_dtype", (b, h, t)),
            "gfinal_state": ("final_state_dtype", (b, h, e, m)),
            "gfinal_key_sum": ("final_key_sum_dtype", (b, h, e)),
        }
    for name, (field, shape) in wide.items():
        if problem.dtype(field).itemsize:
            x = draw(*shape)
            drawn[name] = x.abs() + 0.5 if name in ("norm", "initial_key_sum") else x
    if case == "negative_norm" and "norm" in drawn:
        drawn["norm"].neg_()
    if case == "wide_norms" and normed:
        _widen_norms(drawn)
    return drawn


def _widen_norms(drawn: dict[str, torch.Tensor]) -> None:
    """Multiply the norms of each head by 1, 2^15 or 2^-14, in turn; in the forward pass, q.

    In fp16 the factors are 2^10 and 2^-7, or gradients would leave its range.
    """
    import torch

    of = drawn["norm" if "norm" in drawn else "q"]
    up, down = (10, -7) if drawn["q"].dtype == torch.float16 else (15, -14)
    factors = torch.tensor((1.0, 2.0**up, 2.0**down), device=of.device)
    kinds = torch.arange(of.shape[0] * of.shape[1], device=of.device).view(of.shape[:2]) % 3
    of *= factors[kinds].view(*of.shape[:2], *[1] * (of.dim() - 2)).to(of.dtype)


def trained(
    pass_name: str, problem: Problem, inputs: Tensors, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """q and k with a scale per channel; k also has outlier channels and a large first step.

    In each head one key channel in 32 is ten times as large in every step: the outlier channels of
    key caches, Liu et al. 2024, arXiv:2402.02750 (KIVI), and Hooper et al. 2024, arXiv:2401.18079.
    The first step's key is four times as large, an attention sink: Xiao et al. 2023,
    arXiv:2309.17453. The papers are about softmax attention. The spread of the other channels, a
    factor of e^0.4, is assumed.
    """
    import torch

    q, k = inputs["q"], inputs["k"]
    heads, features = k.shape[1], k.shape[3]
    spread = torch.randn(2, heads, 1, features, generator=generator, device=k.device)
    of_q, of_k = (0.4 * spread).exp()
    of_k[..., 7::32] = 10.0
    found = {"q": (q * of_q).to(q.dtype), "k": (k * of_k).to(k.dtype)}
    found["k"][:, :, :1] *= 4.0
    return found


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """max(|y|, root of the sum of the terms' squares); see `root_sum_square_scale`."""
    squares = {name: x.square() for name, x in inputs.items()}
    if "gout_dot_out" in squares:  # the definition subtracts this term, but the squares must add
        squares["gout_dot_out"] = -squares["gout_dot_out"]
    of_squares = {name: x**2 for name, x in scalars.items()}
    if pass_name == "forward":
        of_squares["return_norm"] = 0.0
    terms = definition(pass_name, squares, of_squares)
    if scalars.get("return_norm") and pass_name == "forward":
        terms["out"] = terms["out"] / outputs["norm"].square()[..., None]
    return root_sum_square_scale(outputs, terms)


def cost(pass_name: str, problem: Problem) -> Cost:
    """Every tensor is moved once; the multiply-adds are those of the cheapest algorithm.

    Per head and step, the recurrence has 2 * E * M (forward) and 5 * E * M (backward). For a small
    T without states, the products of all pairs of steps are fewer. The chunked algorithm does the
    recurrence's work plus that of the pairs within chunks.
    """
    b, h, t, e, m = problem.shape(("B", "H", "T", "E", "M"))
    forward = pass_name == "forward"
    adds = (2 if forward else 5) * t * e * m
    states = ("initial_state_dtype", "final_state_dtype")
    if not any(problem.dtype(field).itemsize for field in states):
        pairs = t * (t + 1) // 2
        adds = min(adds, pairs * (e + m if forward else 3 * e + 2 * m))
    unit: Literal["3xhalf", "tf32", "half"] = "half"
    if problem.dtype("dtype").name == "fp32":
        unit = "tf32" if problem.dtype("product_dtype").rounds else "3xhalf"
    moved = moved_bytes(SIGNATURE.pass_named(pass_name), problem)
    return Cost(bytes=moved, flops=2 * b * h * adds, unit=unit)


DOC = """\
S_t = S_{t-1} + k_t v_t^T,  z_t = z_{t-1} + k_t;  S_0, z_0 as given, else 0
out_t = scale * q_t S_t, with return_norm divided by
norm_t = scale * q_t . z_t + eps

Gradients, with g = gout / norm and n = -gout_dot_out / norm (without norm: g = gout, n = 0):
gq_t = scale * (S_t g_t + n_t z_t)
G_t = G_{t+1} + scale * q_t g_t^T,  y_t = y_{t+1} + scale * n_t q_t
gk_t = G_t v_t + y_t,  gv_t = k_t G_t

G_{T+1} and y_{T+1} are the gradients of the final state and key sum, else 0; G_1 and y_1 are
those of the initial state and key sum"""

_TF32 = "dtype=fp32,product_dtype=tf32"
_DECODE = "initial_state_dtype=fp32,final_state_dtype=fp32"

OPERATOR = Operator(
    name="linear_attention",
    summary="Causal dot product: attention without softmax, in linear time.",
    source="Katharopoulos, Vyas, Pappas and Fleuret 2020, arXiv:2006.16236.",
    doc=DOC,
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=(
        "tiny", "huge", "positive", "alternating", "negative_norm", "wide_norms", "nonfinite",
    ),
    cost=cost,
    problems={
        "cuda": (
            "B=8,H=16,T=4096,E=64,M=64,dtype=fp32",
            f"B=8,H=16,T=4096,E=64,M=64,{_TF32}",
            "B=8,H=16,T=4096,E=64,M=64,dtype=bf16",
            "B=1,H=8,T=4096,E=64,M=64,dtype=fp32",
            f"B=1,H=8,T=4096,E=64,M=64,{_TF32}",
            f"B=2,H=8,T=2048,E=128,M=128,{_TF32}",
            "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
            "B=2,H=8,T=1000,E=72,M=40,dtype=fp32",
            f"B=64,H=16,T=1,E=64,M=64,dtype=fp32,{_DECODE}",
            f"B=4,H=16,T=512,E=64,M=64,dtype=bf16,{_DECODE}",
        ),
        "cuda backward": (
            "B=8,H=16,T=4096,E=64,M=64,dtype=fp32",
            f"B=8,H=16,T=4096,E=64,M=64,{_TF32}",
            "B=8,H=16,T=4096,E=64,M=64,dtype=bf16",
            "B=1,H=8,T=4096,E=64,M=64,dtype=fp32",
            f"B=1,H=8,T=4096,E=64,M=64,{_TF32}",
            f"B=2,H=8,T=2048,E=128,M=128,{_TF32}",
            "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
            "B=2,H=8,T=1000,E=72,M=40,dtype=fp32",
            "B=4,H=16,T=2048,E=64,M=64,dtype=bf16,norm_dtype=fp32",
        ),
        "host": (
            "B=1,H=2,T=33,E=16,M=16,dtype=fp32",
            f"B=1,H=1,T=20,E=9,M=5,dtype=bf16,norm_dtype=fp32,{_DECODE}",
        ),
    },
    peers=peers,
    gradients=Gradients(dots=(Dot("gout_dot_out", "gout", "out", beside="norm"),)),
    scale=scale,
    aliases=("lmha", "causal_dot_product"),
    slab_dim="B",
    repeats=("B", "H"),
    serial_dims=("T",),
    head_dims=("E", "M"),
    widens=True,
    trained=trained,
)
