"""RWKV-4: a mean of values per channel, weighted by exponentials of keys that decay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import Dim, DTypeField, Option, Pass, Signature, Tensor
from kgen.operators import _trained as trained
from kgen.operators._shared import case_factor, moved_bytes, rare_decays
from kgen.operators._wkv4_definition import EMPTY, definition, scale
from kgen.operators._wkv4_peers import peers
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

_STEPS = ("B", "T", "C")
_STATE = ("B", "C", "3")
_STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
_DECAY_FORM = Option(
    "decay_form",
    ("log", "raw"),
    default="log",
    doc="Form of w. log: the log decay, at most 0; -inf is a decay of 0. raw: the parameter "
    "`time_decay` of RWKV's models, the log decay is -exp(w).",
)


def _rows(name: str, doc: str, layout_of: str = "") -> Tensor:
    """One row of channels per step; the caller chooses the strides of B and T."""
    return Tensor(name, _STEPS, free_strides=("B", "T"), layout_of=layout_of, doc=doc)


_INPUTS = (
    _rows("k", "fp32, fp16 or bf16; C contiguous, any strides of B and T."),
    _rows("v", "dtype of k."),
    Tensor("w", ("C",), "w_dtype", doc="dtype of k, or fp32; the decay, as decay_form says."),
    Tensor("u", ("C",), "u_dtype",
           doc="dtype of k, or fp32; added to the key of the current step."),
    Tensor("initial_state", _STATE, "initial_state_dtype",
           doc="fp32; (num, den, max) before the first step; None: (0, 0, -1e38)."),
)  # fmt: skip
SIGNATURE = Signature(
    dims=(Dim("B", "batch"), Dim("T", "time steps"), Dim("C", "channels")),
    dtypes=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("w_dtype", ("dtype", "fp32"), default="fp32"),
        DTypeField("u_dtype", ("dtype", "fp32"), default="dtype"),
        DTypeField("initial_state_dtype", ("none", "fp32"), default="none"),
        DTypeField("final_state_dtype", ("none", "fp32"), default="none"),
    ),
    options=(_DECAY_FORM,),
    passes=(
        Pass(
            "forward",
            inputs=_INPUTS,
            outputs=(
                _rows("y", "dtype and layout of v.", layout_of="v"),
                Tensor("final_state", _STATE, "final_state_dtype",
                       doc="fp32; (num, den, max) after the last step."),
            ),
        ),
        Pass(
            "backward",
            inputs=(
                _rows("gy", "Gradient of y; dtype of k; C contiguous, any strides of B and T."),
                *_INPUTS,
                Tensor("gfinal_state", _STATE, "final_state_dtype",
                       doc="fp32; gradient of final_state. Its third element is ignored."),
            ),
            outputs=(
                _rows("gk", "dtype and layout of k.", layout_of="k"),
                _rows("gv", "dtype and layout of v.", layout_of="v"),
                Tensor("gw", ("C",), "w_dtype", doc="dtype of w; summed over B and T."),
                Tensor("gu", ("C",), "u_dtype", doc="dtype of u; summed over B and T."),
                Tensor("ginitial_state", _STATE, "initial_state_dtype",
                       doc="fp32; gradient of initial_state."),
            ),
        ),
    ),
)  # fmt: skip

_DOC = """\
y_t = (N_{t-1} + exp(u + k_t) v_t) / (D_{t-1} + exp(u + k_t)), for each channel
N_t = exp(w) N_{t-1} + exp(k_t) v_t,  D_t = exp(w) D_{t-1} + exp(k_t)
The log decay is w, with decay_form "raw" -exp(w).

A state (num, den, max) stands for N = num exp(max), D = den exp(max). The final max is the
largest exponent of a term, max_t = max(max_{t-1} + w, k_t), so that no exponential overflows.

Gradients, with q_t the denominator of y_t, r_t = gy_t / q_t, and the log decay w:
GN_{t-1} = exp(w) GN_t + r_t,  GD_{t-1} = exp(w) GD_t - r_t y_t
gv_t = exp(u + k_t) r_t + exp(k_t) GN_t
gk_t = exp(u + k_t) r_t (v_t - y_t) + exp(k_t) (v_t GN_t + GD_t)
gu = sum over b and t of exp(u + k_t) r_t (v_t - y_t)
gw = sum over b and t of exp(w) (N_{t-1} GN_t + D_{t-1} GD_t)

The gradient (gnum, gden, gmax) of the final state begins the recurrence, and GN_0 and GD_0 give
that of the initial state:
GN_T = gnum exp(-max),  GD_T = gden exp(-max)
gnum = GN_0 exp(max),  gden = GD_0 exp(max),  gmax = num gnum + den gden

The max of the final state is only a scale factor of num and den and is treated as a constant,
so its gradient gmax is ignored. This is exact for every loss that depends on a state only
through N and D, as y does. FLA passes the gradient with respect to max on to the step that has
the maximum; both agree for such losses."""


def make_inputs(
    pass_name: str, problem: Problem, case: str, generator: torch.Generator, device: torch.device
) -> dict[str, torch.Tensor]:
    """Draw the inputs; the case decides scale, keys, decays and special values.

    Log decays are those of RWKV-4's initialisation, -0.007 to -20; keys are of a few units. `tiny`
    and `huge` scale v and gy by 1e-4 and 1e4 (fp16: 1e2). `large_keys` has keys of hundreds, whose
    exponentials overflow fp32: one step outweighs all others. `far_exponents` has keys and an
    initial max of 50, one key in 16 of -1000, and u from 10 to 30. `rising` and `falling` let k
    grow or fall by 1 per step, so that the maximum changes at every step, or never. `alternating`
    makes neighbouring terms cancel. `extreme_decay` has log decays from 0 to -inf, `no_decay` only
    0, and `rare_decays` -1e-7 to -1e-2, -9 to -20 and 0.

    `nonfinite` plants a NaN in k, v and gy, and in the forward pass an Inf in the last v: for an
    Inf in an earlier step, the result would depend on whether an algorithm multiplies it by a
    weight that has been rounded to 0.
    """
    import torch

    b, t, c = problem.shape(_STEPS)

    def dtype_of(field: str) -> torch.dtype:
        found: torch.dtype = getattr(torch, problem.dtype(field).torch)
        return found

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    steps = torch.arange(t, device=device).view(t, 1)
    k = 2 * draw(b, t, c)
    if case == "large_keys":
        k *= 32
    elif case == "far_exponents":
        k = torch.where(draw(b, t, c) > 1.5, -1000.0, k + 50)
    elif case in ("rising", "falling"):
        k += steps if case == "rising" else -steps
    drawn = {"k": k}
    for name in ("v",) if pass_name == "forward" else ("v", "gy"):
        x = draw(b, t, c)
        if case == "alternating":
            x = x.abs() * (1 - 2 * (steps % 2))
        drawn[name] = x * case_factor(case, dtype_of("dtype"))
    if case == "nonfinite" and b * t * c:
        drawn["k"][b - 1, t // 3, c // 2] = float("nan")
        drawn["v"][0, t // 2, 0] = float("nan")
        if pass_name == "forward":
            drawn["v"][b // 2, t - 1, c - 1] = float("inf")
        else:
            drawn["gy"][b // 2, t // 4, c - 1] = float("nan")
    drawn = {name: x.to(dtype_of("dtype")) for name, x in drawn.items()}

    uniform = torch.rand(c, generator=generator, device=device)
    decay = -torch.exp(8 * uniform - 5)
    if case == "no_decay":
        decay = torch.zeros_like(decay)
    elif case == "extreme_decay":
        # A permutation: each value occurs, and beside others, if there are as many channels.
        some = [0.0, -1e-3, -1.0, -7.4, -50.0, -1e4, float("-inf")]
        choice = torch.randperm(c, generator=generator, device=device) % len(some)
        decay = torch.tensor(some, device=device)[choice]
    elif case == "rare_decays":
        decay = rare_decays(uniform)
    raw = dict(problem.dtypes)[_DECAY_FORM.name] == "raw"
    drawn["w"] = ((-decay).log() if raw else decay).to(dtype_of("w_dtype"))
    u = draw(c)
    if case == "far_exponents":
        u = 10 + 20 * torch.rand(c, generator=generator, device=device)
    drawn["u"] = u.to(dtype_of("u_dtype"))
    if problem.dtype("initial_state_dtype").itemsize:
        state = torch.stack([draw(b, c), 1 + draw(b, c).abs(), draw(b, c)], dim=-1)
        if case == "far_exponents":
            state[..., 2] += 50
        nothing = torch.tensor([0.0, 0.0, EMPTY], device=device)
        empty = torch.randint(0, 4, (b, c, 1), generator=generator, device=device) == 0
        drawn["initial_state"] = torch.where(empty, nothing, state)
    if pass_name == "backward" and problem.dtype("final_state_dtype").itemsize:
        drawn["gfinal_state"] = draw(b, c, 3)
    return drawn


def cost(pass_name: str, problem: Problem) -> Cost:
    """Every tensor is moved once: forward k, v and y; backward gy, k, v, gk and gv.

    Published backward kernels move a sixth tensor [B, T, C], y, which can be recomputed. The
    operations are a multiply-add each for numerator and denominator per term; exponentials are not
    counted.
    """
    b, t, c = problem.shape(_STEPS)
    moved = moved_bytes(SIGNATURE.pass_named(pass_name), problem)
    return Cost(bytes=moved, flops=(8 if pass_name == "forward" else 28) * b * t * c)


_TRAINED = (
    "B=8,T=4096,C=2048,dtype=bf16",
    "B=1,T=16384,C=768,dtype=bf16",
    "B=8,T=512,C=4096,dtype=bf16,decay_form=raw",
    "B=2,T=1000,C=1001,dtype=fp32",
)

OPERATOR = Operator(
    name="wkv4",
    summary="RWKV-4 time mixing: a mean weighted by exponentials, with a decay per channel.",
    source="Peng et al. 2023, arXiv:2305.13048.",
    doc=_DOC,
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=(
        "tiny", "huge", "large_keys", "far_exponents", "rising", "falling", "alternating",
        "no_decay", "extreme_decay", "rare_decays", "nonfinite",
    ),
    cost=cost,
    problems={
        "cuda": (*_TRAINED, f"B=64,T=1,C=2560,dtype=bf16,decay_form=raw,{_STATES}"),
        "cuda backward": _TRAINED,
        "host": (
            "B=2,T=33,C=24,dtype=fp32",
            f"B=1,T=20,C=17,dtype=bf16,{_STATES}",
        ),
    },
    peers=peers,
    scale=scale,
    aliases=("rwkv4",),
    slab_dim="B",
    repeats=("B",),
    serial_dims=("T",),
    widens=True,
    trained=trained.wkv4,
)  # fmt: skip
