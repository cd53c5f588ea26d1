"""Linear attention: the causal dot product without softmax, as a recurrence over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Pass, Scalar, Signature, Tensor
from kgen.operators._linear_attention_peers import peers
from kgen.operators.base import Cost, Operator

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
        Dim("M", "value features", smallest=1),
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
    """The recurrences of the operator's `doc`, step by step, in fp32 or wider.

    A step sees no later one, so that no mask multiplies a zero by a NaN; and no [T, T] matrix is
    ever there.
    """
    if pass_name == "forward":
        return _forward(inputs, scalars)
    return _backward(inputs, scalars["scale"])


def _wide_steps(inputs: Tensors, name: str) -> list[torch.Tensor]:
    """A tensor's steps in fp32 or wider, each [B, H, features]."""
    import torch

    x = inputs[name]
    return list(x.to(torch.promote_types(x.dtype, torch.float32)).unbind(2))


def _start(inputs: Tensors, name: str, like: torch.Tensor, features: int) -> torch.Tensor:
    """A given state [B, H, E, M], or zeros."""
    b, h = like.shape[:2]
    state = inputs.get(name)
    return _zeros(like, b, h, like.shape[-1], features) if state is None else state


def _zeros(like: torch.Tensor, *shape: int) -> torch.Tensor:
    import torch

    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(shape, dtype=wide, device=like.device)


def _stacked(steps: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """[B, H, T, features] of a list of steps, in the dtype and shape of `like`."""
    import torch

    return torch.stack(steps, dim=2).to(like.dtype) if steps else torch.zeros_like(like)


def _forward(inputs: Tensors, scalars: Mapping[str, float]) -> dict[str, torch.Tensor]:
    import torch

    k, v = inputs["k"], inputs["v"]
    state = _start(inputs, "initial_state", k, v.shape[-1])
    keys = inputs.get("initial_key_sum")
    keys = _zeros(k, *k.shape[:2], k.shape[-1]) if keys is None else keys
    outs, norms = [], []
    for q_t, k_t, v_t in zip(*(_wide_steps(inputs, n) for n in "qkv"), strict=True):
        state = torch.addcmul(state, k_t[..., None], v_t[..., None, :])
        keys = keys + k_t
        out = (q_t[..., None, :] @ state).squeeze(-2) * scalars["scale"]
        norm = (q_t * keys).sum(-1) * scalars["scale"] + scalars["eps"]
        outs.append(out / norm[..., None] if scalars.get("return_norm") else out)
        norms.append(norm)
    return {
        "out": _stacked(outs, v),
        "final_state": state,
        "final_key_sum": keys,
        "norm": torch.stack(norms, dim=2) if norms else _zeros(k, *k.shape[:3]),
    }


def _backward(inputs: Tensors, scale: float) -> dict[str, torch.Tensor]:
    """One walk forward in time for gq, one backward for the others.

    The norm is one more column of v, of ones: its gradient one more column of gout.
    """
    import torch

    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    q_steps, k_steps, v_steps = (_wide_steps(inputs, n) for n in "qkv")
    g_steps = [g * scale for g in _wide_steps(inputs, "gout")]
    nothing = _zeros(k, *k.shape[:2], 1)
    n_steps = [nothing] * len(g_steps)
    if "norm" in inputs:
        g_steps = [g / n[..., None] for g, n in zip(g_steps, inputs["norm"].unbind(2), strict=True)]
        n_steps = [
            -scale * dot / n
            for dot, n in zip(
                inputs["gout_dot_out"][..., None].unbind(2),
                inputs["norm"][..., None].unbind(2),
                strict=True,
            )
        ]
    state = _start(inputs, "initial_state", k, v.shape[-1])
    keys = inputs.get("initial_key_sum")
    keys = _zeros(k, *k.shape[:2], k.shape[-1]) if keys is None else keys
    gq = []
    for k_t, v_t, g_t, n_t in zip(k_steps, v_steps, g_steps, n_steps, strict=True):
        state = torch.addcmul(state, k_t[..., None], v_t[..., None, :])
        gq_t = (state @ g_t[..., None]).squeeze(-1)
        if "norm" in inputs:
            keys = keys + k_t
            gq_t = torch.addcmul(gq_t, keys, n_t)
        gq.append(gq_t)

    gstate = _start(inputs, "gfinal_state", k, v.shape[-1])
    gkeys = inputs.get("gfinal_key_sum")
    gkeys = _zeros(k, *k.shape[:2], k.shape[-1]) if gkeys is None else gkeys
    gk, gv = [], []
    for q_t, k_t, v_t, g_t, n_t in reversed(
        list(zip(q_steps, k_steps, v_steps, g_steps, n_steps, strict=True))
    ):
        gstate = torch.addcmul(gstate, q_t[..., None], g_t[..., None, :])
        if "norm" in inputs:
            gkeys = torch.addcmul(gkeys, q_t, n_t)
        gk.append((gstate @ v_t[..., None]).squeeze(-1) + gkeys)
        gv.append((k_t[..., None, :] @ gstate).squeeze(-2))
    return {
        "gq": _stacked(gq, q),
        "gk": _stacked(gk[::-1], k),
        "gv": _stacked(gv[::-1], v),
        "ginitial_state": gstate,
        "ginitial_key_sum": gkeys,
    }


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw the inputs; the case decides their scale, signs and special values.

    q and k shrink as T grows, so that sums over T stay within fp16. With a norm both are positive,
    as feature maps make them: else it would pass through zero. `tiny` and `huge` scale v and gout
    by 1e-4 and 1e4 (fp16: 1e2); `positive` makes everything positive, so that a bias of the
    summation adds up; `alternating` gives v and gout a sign that changes at every step;
    `nonfinite` plants a NaN in q, v and gout, and in k an Inf (backward: a NaN), which may reach no
    step that does not depend on them. Inf elsewhere is not planted: whether Inf - Inf occurs would
    depend on the order of summation, which differs from algorithm to algorithm.
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
        drawn[name] = (x / max(t, 1) ** 0.25).to(dtype)
    sign = 1 - 2 * (torch.arange(t, device=device) % 2).view(t, 1)
    for name in ("v",) if pass_name == "forward" else ("v", "gout"):
        x = draw(b, h, t, m)
        if case in ("positive", "alternating"):
            x = x.abs()
        if case == "alternating":
            x = x * sign
        elif case == "tiny":
            x = x * 1e-4
        elif case == "huge":
            x = x * (1e2 if dtype == torch.float16 else 1e4)
        drawn[name] = x.to(dtype)
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
    return drawn


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """max(|y|, root of the sum of the terms' squares), as in timex: roundings of terms are
    independent, so they add as squares do.
    """
    squares = {name: x.square() for name, x in inputs.items()}
    if "gout_dot_out" in squares:  # its term is subtracted: squares must add up
        squares["gout_dot_out"] = -squares["gout_dot_out"]
    of_squares = {name: x**2 for name, x in scalars.items()}
    if pass_name == "forward":
        of_squares["return_norm"] = 0.0
    terms = definition(pass_name, squares, of_squares)
    if scalars.get("return_norm") and pass_name == "forward":
        terms["out"] = terms["out"] / outputs["norm"].square()[..., None]
    return {name: y.abs().maximum(terms[name].sqrt()) for name, y in outputs.items()}


def cost(pass_name: str, problem: Problem) -> Cost:
    """Every tensor once; of the known forms the one with the fewest multiply-adds.

    Per head and step, the recurrence has 2 * E * M (forward) and 5 * E * M (backward). Where T is
    small and no state goes in or out, the products of all pairs of steps are fewer. The chunked
    form does the recurrence's work and that of the pairs within chunks.
    """
    signature = SIGNATURE.pass_named(pass_name)
    moved = 0
    for tensor in problem.present(signature).tensors:
        elements = problem.dtype(tensor.dtype).itemsize
        for extent in problem.shape(tensor.dims):
            elements *= extent
        moved += elements
    b, h, t, e, m = problem.shape(("B", "H", "T", "E", "M"))
    forward = pass_name == "forward"
    adds = (2 if forward else 5) * t * e * m
    states = ("initial_state_dtype", "final_state_dtype")
    if not any(problem.dtype(field).itemsize for field in states):
        pairs = t * (t + 1) // 2
        adds = min(adds, pairs * (e + m if forward else 3 * e + 2 * m))
    unit: Literal["3xtf32", "tf32", "half"] = "half"
    if problem.dtype("dtype").name == "fp32":
        unit = "tf32" if problem.dtype("product_dtype").rounds else "3xtf32"
    return Cost(bytes=moved, flops=2 * b * h * adds, unit=unit)


DOC = """\
S_t = S_{t-1} + k_t v_t^T,  z_t = z_{t-1} + k_t;  S_0, z_0 as given, else 0
out_t = scale * q_t S_t, and where norm is wanted, divided by
norm_t = scale * q_t . z_t + eps

Gradients, with g = gout / norm and n = -gout_dot_out / norm (without norm: g = gout, n = 0):
gq_t = scale * (S_t g_t + n_t z_t)
G_t = G_{t+1} + scale * q_t g_t^T,  y_t = y_{t+1} + scale * n_t q_t
gk_t = G_t v_t + y_t,  gv_t = k_t G_t
from the gradients of the final state and key sum, to those of the initial ones"""

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
    cases=("tiny", "huge", "positive", "alternating", "nonfinite"),
    cost=cost,
    problems={
        "cuda": (
            "B=8,H=16,T=4096,E=64,M=64,dtype=fp32",
            f"B=8,H=16,T=4096,E=64,M=64,{_TF32}",
            "B=8,H=16,T=4096,E=64,M=64,dtype=bf16",
            "B=1,H=8,T=4096,E=64,M=64,dtype=fp32",
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
            f"B=2,H=8,T=2048,E=128,M=128,{_TF32}",
            "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
            "B=2,H=8,T=1000,E=72,M=40,dtype=fp32",
        ),
        "host": (
            "B=1,H=2,T=33,E=16,M=16,dtype=fp32",
            f"B=1,H=1,T=20,E=9,M=5,dtype=bf16,norm_dtype=fp32,{_DECODE}",
        ),
    },
    peers=peers,
    scale=scale,
    aliases=("lmha", "causal_dot_product"),
    slab_dim="B",
)
