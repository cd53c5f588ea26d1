"""RWKV-7: the generalised delta rule, with a transition matrix that is diagonal plus rank one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.operators import _trained as trained
from kgen.operators._shared import moved_bytes, root_sum_square_scale
from kgen.operators._wkv7_chunks import definition
from kgen.operators._wkv7_chunks import scale as scale_of_many_steps
from kgen.operators._wkv7_definition import decays, recurrence
from kgen.operators._wkv7_inputs import CASES, make_inputs
from kgen.operators._wkv7_peers import SLOW_PEERS, peers
from kgen.operators._wkv7_signature import SIGNATURE
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
# The error of exp (2 ulp) over the error that a result may have (5 ulp).
_EXP_SHARE = 0.4

_DOC = """\
sa_t = a_t S_{t-1}
S_t = diag(d_t) S_{t-1} + b_t sa_t^T + k_t v_t^T;  S_0 as given, else 0
y_t = scale * r_t S_t
d_t = exp(w_t), with decay_form "raw" exp(-exp(w_t)), with "clamp"
exp(-exp(-0.5) * sigmoid(w_t))

A model passes a = -kk and b = kk * gate, kk a unit vector and gate from 0 to 1: then the state
stays bounded. For other a and b it may grow exponentially.

Gradients, with g = scale * gy and G_T the gradient of the final state, else 0:
G'_t = G_t + r_t g_t^T,  gsa_t = b_t G'_t,  G_{t-1} = diag(d_t) G'_t + a_t gsa_t^T
gr_t = S_t g_t,  gk_t = G'_t v_t,  gv_t = k_t G'_t,  ga_t = S_{t-1} gsa_t,  gb_t = G'_t sa_t
gw_t = dd_t/dw_t * sum_v S_{t-1} * G'_t
With cu_seqlens every sequence begins with a state of its own, as if it were a batch row."""


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """max(|y|, root of the sum of the terms' squares): the recurrence on squares.

    In the recurrence on squares, sa and gsa are given: the squares of their own magnitudes, not
    sums of squares over the squared states. A step replaces the value that is stored under a key,
    by cancellation; sums of squares, in which nothing cancels, would grow exponentially where
    nothing decays.

    With raw w, the decay is exp(-exp(w)): the error of its exponent grows with exp(w), and gw has
    the decay as a factor. In the other outputs, a term with such a strong decay is negligible
    beside terms that have not decayed.

    This function is the scale of wkv7_decode, whose committed rows depend on its source. wkv7 uses
    the same formula in `_wkv7_chunks`.
    """
    decay, slope = decays(inputs["w"], scalars)
    x = {n: y for n, y in inputs.items() if n != "w"} | {"decay": decay}
    exact = recurrence(pass_name, x, scalars["scale"], magnitudes=True)
    x |= {name: exact[name] for name in ("sa", "gsa") if name in exact}
    squares = {n: y.square() if y.is_floating_point() else y for n, y in x.items()}
    squared = recurrence(pass_name, squares, scalars["scale"] ** 2)
    if "gdecay" in squared:
        squared["gw"] = slope.square() * squared["gdecay"]
    found = root_sum_square_scale(outputs, squared)
    if "gw" in found and scalars.get("decay_form=raw"):
        # Where exp(w) is infinite the decay is 0, and so is gw.
        found["gw"] = found["gw"] * (1 + _EXP_SHARE * inputs["w"].exp().clamp_max(1e3))
    return found


def cost(pass_name: str, problem: Problem) -> Cost:
    """Every tensor is moved once; among the known algorithms, the fewest multiply-adds count.

    Per head and step, the chunked algorithm has products of K * V multiply-adds. Forward: S times a
    and r, and the updates of S by k and b. Backward: S times a, g and gsa, the updates of S by k
    and b, G times b, k, v and sa, and the updates of G by r and a. For a few steps without states,
    products of all pairs of steps are fewer.
    """
    moved = moved_bytes(SIGNATURE.pass_named(pass_name), problem)
    b, n, t, h, k, v = problem.shape(("B", "N", "T", "H", "K", "V"))
    forward = pass_name == "forward"
    adds = (4 if forward else 11) * t * k * v
    states = ("initial_state_dtype", "final_state_dtype")
    if not any(problem.dtype(field).itemsize for field in states):
        length = b * t // max(n, 1)  # pairs are fewest if all sequences are equally long
        pairs, earlier = t * (length + 1) // 2, t * max(length - 1, 0) // 2
        each = k + v if forward else 3 * k + 2 * v
        adds = min(adds, (pairs + 3 * earlier) * each)
    unit: Literal["3xhalf", "half"] = "3xhalf" if problem.dtype("dtype").name == "fp32" else "half"
    return Cost(bytes=moved, flops=2 * b * h * adds, unit=unit)


_TRAINED = (
    "B=8,T=4096,H=32,K=64,V=64,dtype=bf16,w_dtype=dtype,decay_form=clamp",
    "B=8,T=4096,H=64,K=64,V=64,dtype=bf16,w_dtype=dtype,decay_form=clamp",
    "B=1,T=16384,H=32,K=64,V=64,dtype=bf16,w_dtype=dtype,decay_form=clamp",
    "B=8,T=512,H=64,K=64,V=64,dtype=bf16,w_dtype=dtype,decay_form=clamp",
    "B=8,T=4096,H=16,K=128,V=128,dtype=bf16,w_dtype=dtype,decay_form=clamp",
    "B=1,N=32,T=16384,H=32,K=64,V=64,dtype=bf16,w_dtype=dtype,cu_seqlens_dtype=int64",
    "B=2,T=1000,H=4,K=100,V=72,dtype=fp32",
)

OPERATOR = Operator(
    name="wkv7",
    summary="RWKV-7 time mixing: a matrix state whose transition is diagonal plus rank one.",
    source="Peng et al. 2025, arXiv:2503.14456.",
    doc=_DOC,
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=CASES,
    cost=cost,
    problems={
        "cuda": (
            *_TRAINED,
            f"B=128,T=1,H=32,K=64,V=64,dtype=bf16,decay_form=clamp,{STATES}",
            f"B=1,T=1,H=32,K=64,V=64,dtype=bf16,decay_form=clamp,{STATES}",
        ),
        "cuda backward": (
            *_TRAINED, f"B=4,T=2048,H=32,K=64,V=64,dtype=bf16,decay_form=log,{STATES}",
        ),
        "host": (
            "B=1,T=33,H=2,K=16,V=16,dtype=fp32",
            f"B=1,T=20,H=1,K=9,V=5,dtype=bf16,decay_form=clamp,{STATES}",
        ),
    },
    peers=peers,
    scale=scale_of_many_steps,
    aliases=("rwkv7",),
    slab_dim="B",
    repeats=("B", "N", "H"),
    serial_dims=("T",),
    head_dims=("K", "V"),
    widens=True,
    slow_peers=SLOW_PEERS,
    trained=trained.wkv7,
)
