"""The common declaration of wkv5 and wkv6, which differ in w: [H, K] in wkv5, [B, T, H, K] in wkv6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kgen.model.problem import Problem
from kgen.model.signature import (
    Dim,
    DTypeField,
    Option,
    Packing,
    Pass,
    Scalar,
    Signature,
    Tensor,
)
from kgen.operators import _trained as trained
from kgen.operators._shared import (
    case_factor,
    moved_bytes,
    plant_at_ends,
    rare_decays,
    root_sum_square_scale,
)
from kgen.operators._wkv_definition import decays, definition, recurrence
from kgen.operators._wkv_peers import SLOW_PEERS, peers
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

_STATE = ("N", "H", "K", "V")
_STEP = ("B", "T", "H")
_ANY_LAYOUT = "the last dim contiguous, any strides of B, T and H."

CASES = (
    "tiny", "huge", "positive", "alternating", "extreme_decay", "no_decay", "rare_decays", "mixed",
    "nonfinite", "nonfinite_ends",
)
STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"

_DECAY_FORM = Option(
    "decay_form",
    ("log", "raw", "decay"),
    default="log",
    doc="Form of w. log: the log decay, at most 0; -inf is a decay of 0. raw: the parameter of "
    "RWKV's models, the decay is exp(-exp(w)). decay: the decay itself, from 0 to 1.",
)

# Step of the difference quotient by w: T times the step is small, and its square exceeds 1e-16.
_STEP_OF_W = 1e-5
# The error of exp (2 ulp) over the error that a result may have (5 ulp).
_EXP_SHARE = 0.4


def _rows(name: str, features: str, doc: str, dtype: str = "dtype", layout_of: str = "") -> Tensor:
    """One row of features per step; the caller chooses the strides of B, T and H."""
    return Tensor(
        name, (*_STEP, features), dtype, free_strides=_STEP, layout_of=layout_of, doc=doc
    )


def signature(per_step: bool) -> Signature:
    """Dims, dtypes and passes.

    Args:
        per_step: Whether w is [B, T, H, K] (wkv6) or [H, K] (wkv5).
    """
    what = "dtype of r, or fp32; the decay, as decay_form says."
    if per_step:
        w = _rows("w", "K", what, "w_dtype")
        gw = _rows("gw", "K", "dtype and layout of w.", "w_dtype", layout_of="w")
    else:
        w = Tensor("w", ("H", "K"), "w_dtype", doc=what)
        gw = Tensor("gw", ("H", "K"), "w_dtype", doc="dtype of w.")
    inputs = (
        _rows("r", "K", f"fp32, fp16 or bf16; {_ANY_LAYOUT}"),
        _rows("k", "K", "dtype of r."),
        _rows("v", "V", "dtype of r."),
        w,
        Tensor(
            "u", ("H", "K"), "u_dtype",
            doc="dtype of r, or fp32; the bonus of the current step.",
        ),
        Tensor(
            "initial_state", _STATE, "initial_state_dtype",
            doc="fp32; S before the first step; None: 0. N is B, or with cu_seqlens the number of "
            "sequences.",
        ),
    )
    cu_seqlens = Tensor(
        "cu_seqlens", ("N + 1",), "cu_seqlens_dtype",
        doc="int32 or int64; None: every batch row is a sequence. Otherwise B is 1, and sequence n "
        "has the steps cu_seqlens[n] <= t < cu_seqlens[n + 1], possibly none. The first offset "
        "must be 0, the last T, and offsets must not decrease. The values stay on the device and "
        "are not checked.",
    )
    return Signature(
        dims=(
            Dim("B", "batch"),
            Dim("N", "sequences; B, unless they are packed"),
            Dim("T", "time steps"),
            Dim("H", "heads"),
            Dim("K", "key features", smallest=1),
            Dim("V", "value features", smallest=1, like="K", both="D"),
        ),
        dtypes=(
            DTypeField("dtype", ("fp32", "fp16", "bf16")),
            DTypeField("w_dtype", ("dtype", "fp32"), default="fp32"),
            DTypeField("u_dtype", ("dtype", "fp32"), default="dtype"),
            DTypeField("initial_state_dtype", ("none", "fp32"), default="none"),
            DTypeField("final_state_dtype", ("none", "fp32"), default="none"),
            DTypeField("cu_seqlens_dtype", ("none", "int32", "int64"), default="none"),
        ),
        options=(_DECAY_FORM,),
        packing=Packing(offsets="cu_seqlens", sequences="N", batch="B"),
        passes=(
            Pass(
                "forward",
                inputs=(*inputs, cu_seqlens),
                outputs=(
                    _rows("y", "V", "dtype and layout of v.", layout_of="v"),
                    Tensor(
                        "final_state", _STATE, "final_state_dtype",
                        doc="fp32; S after the last step.",
                    ),
                ),
                scalars=(Scalar("scale", 1.0, doc="Factor of y; often 1 or K ** -0.5."),),
            ),
            Pass(
                "backward",
                inputs=(
                    _rows("gy", "V", f"gradient of y; dtype of r; {_ANY_LAYOUT}"),
                    *inputs,
                    Tensor(
                        "gfinal_state", _STATE, "final_state_dtype",
                        doc="fp32; gradient of final_state.",
                    ),
                    cu_seqlens,
                ),
                outputs=(
                    _rows("gr", "K", "dtype and layout of r.", layout_of="r"),
                    _rows("gk", "K", "dtype and layout of k.", layout_of="k"),
                    _rows("gv", "V", "dtype and layout of v.", layout_of="v"),
                    gw,
                    Tensor("gu", ("H", "K"), "u_dtype", doc="dtype of u."),
                    Tensor(
                        "ginitial_state", _STATE, "initial_state_dtype",
                        doc="fp32; gradient of initial_state.",
                    ),
                ),
                scalars=(Scalar("scale", 1.0, doc="As in the forward pass."),),
            ),
        ),
    )


@dataclass(frozen=True, slots=True)
class Inputs:
    """Draws the inputs of a pass.

    Attributes:
        per_step: Whether w is [B, T, H, K] or [H, K].
    """

    per_step: bool

    def __call__(
        self,
        pass_name: str,
        problem: Problem,
        case: str,
        generator: torch.Generator,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Draw the inputs; the case decides scale, signs, decays and special values.

        r and k shrink as T grows, so that sums over T stay within fp16's range without a decay.
        Decays are in the range that models have, 0.07 to 0.998 per step. `extreme_decay` has decays
        from 1 over exp(-exp(2)) down to exactly 0, `no_decay` only decays of 1, and `mixed` both of
        these among ordinary ones. `rare_decays` has log decays of -1e-7 to -1e-2, -9 to -20 and 0.
        Other forms of w express the same decays. `tiny`, `huge`, `positive` and `alternating` are
        as in linear_attention.

        `nonfinite` plants a NaN in r, k, v, gy and in wkv6 in w. In the forward pass, k gets an Inf
        in the last step instead: for an Inf in an earlier step, the result would depend on whether
        an algorithm multiplies it by a decay that has been rounded to 0. `nonfinite_ends` plants
        NaN in the first and the last step of every second sequence; the others must stay finite.
        """
        import torch

        b, n, t, h, k, v = problem.shape(("B", "N", "T", "H", "K", "V"))
        dtype = getattr(torch, problem.dtype("dtype").torch)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device)

        drawn: dict[str, torch.Tensor] = {}
        for name in ("r", "k"):
            x = draw(b, t, h, k)
            drawn[name] = (x.abs() if case == "positive" else x) / max(t, 1) ** 0.25
        sign = 1 - 2 * (torch.arange(t, device=device) % 2).view(t, 1, 1)
        for name in ("v",) if pass_name == "forward" else ("v", "gy"):
            x = draw(b, t, h, v)
            if case in ("positive", "alternating"):
                x = x.abs()
            if case == "alternating":
                x = x * sign
            drawn[name] = x * case_factor(case, dtype)
        if case == "nonfinite" and b * h * t:
            nan = float("nan")
            drawn["r"][b // 2, t - 1, h // 2, k - 1] = nan
            drawn["v"][0, t // 2, 0, v // 2] = nan
            if pass_name == "forward":
                drawn["k"][b - 1, t - 1, h - 1, k // 2] = float("inf")
            else:
                drawn["k"][b - 1, t // 3, h - 1, k // 2] = nan
                drawn["gy"][0, t // 3, h - 1, 0] = nan
        drawn = {name: x.to(dtype) for name, x in drawn.items()}

        u = draw(h, k)
        shape = (b, t, h, k) if self.per_step else (h, k)
        w = _in_form(_log_decays(case, shape, generator, device), dict(problem.dtypes))
        if case == "nonfinite" and self.per_step and b * h * t:
            w[b // 2, t // 4, 0, 0] = float("nan")
        drawn["w"] = w.to(getattr(torch, problem.dtype("w_dtype").torch))
        drawn["u"] = (u.abs() if case == "positive" else u).to(
            getattr(torch, problem.dtype("u_dtype").torch)
        )
        wide = {"initial_state": "initial_state_dtype"}
        if pass_name == "backward":
            wide["gfinal_state"] = "final_state_dtype"
        for name, field in wide.items():
            if problem.dtype(field).itemsize:
                drawn[name] = draw(n, h, k, v)
        if problem.dtype("cu_seqlens_dtype").itemsize:
            # Random boundaries: some sequences may have no step, or most of the steps.
            cuts = torch.randint(0, t + 1, (n - 1,), generator=generator, device=device)
            ends = torch.tensor([0, t], device=device)
            offsets = torch.cat([ends[:1], cuts.sort().values, ends[1:]])
            drawn["cu_seqlens"] = offsets.to(
                getattr(torch, problem.dtype("cu_seqlens_dtype").torch)
            )
        if case == "nonfinite_ends":
            plant_at_ends(drawn)
        return drawn


def _log_decays(
    case: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    import torch

    uniform = torch.rand(shape, generator=generator, device=device)
    ordinary = -torch.exp(7 * uniform - 6)
    choice = torch.randint(0, 12, shape, generator=generator, device=device)
    extreme = torch.tensor(
        [0.0, -1e-3, -1.0, -7.389, -7.389, -20.0, -50.0, -50.0, -90.0, -1e4, float("-inf"), 0.0],
        device=device,
    )[choice]
    if case == "no_decay":
        return torch.zeros_like(ordinary)
    if case == "rare_decays":
        return rare_decays(uniform)
    if case == "extreme_decay":
        return extreme
    return torch.where(choice % 2 == 0, ordinary, extreme) if case == "mixed" else ordinary


def _in_form(log_decays: torch.Tensor, choices: Mapping[str, str]) -> torch.Tensor:
    """Convert log decays to w in the decay form that a problem chose."""
    form = choices[_DECAY_FORM.name]
    if form == "log":
        return log_decays
    return (-log_decays).log() if form == "raw" else log_decays.exp()


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """max(|y|, root of the sum of the terms' squares), as in linear_attention.

    The sums of squares are the definition evaluated on squared inputs and squared decays.

    wkv5 has the same decay, with the same rounding error, at every step: a term that was multiplied
    by it n times may have n times this error. The sum of n^2 * term^2 is the second derivative by
    the log decay.

    With raw w, the decay is exp(-exp(w)): the error of its exponent grows with exp(w), and gw has
    the decay as a factor. In the other outputs, a term with such a strong decay is negligible
    beside terms that have not decayed.
    """
    squares = {
        n: x.square() if x.is_floating_point() else x for n, x in inputs.items() if n != "w"
    }
    decay, slope = (x.square() for x in decays(inputs["w"], scalars))
    exact = bool(scalars.get("decay_form=decay"))  # w is the decay itself: no exp, no error

    def terms(shift: float) -> dict[str, torch.Tensor]:
        factor = math.exp(shift)
        by_w = slope if exact else slope * factor
        return recurrence(pass_name, squares, (decay * factor, by_w), scalars["scale"] ** 2)

    squared = terms(0.0)
    if decay.ndim == 2 and not exact:
        above, below = terms(_STEP_OF_W), terms(-_STEP_OF_W)
        for name, term in squared.items():
            reached = (above[name] + below[name] - 2 * term) / _STEP_OF_W**2
            squared[name] = term + _EXP_SHARE**2 * reached.clamp_min(0.0)
    found = root_sum_square_scale(outputs, squared)
    if "gw" in found and scalars.get("decay_form=raw"):
        # Where exp(w) is infinite the decay is 0, and so is gw.
        found["gw"] = found["gw"] * (1 + _EXP_SHARE * inputs["w"].exp().clamp_max(1e3))
    return found


@dataclass(frozen=True, slots=True)
class LeastWork:
    """The least work of a call.

    Attributes:
        signature: The signature whose tensors are moved.
    """

    signature: Signature

    def __call__(self, pass_name: str, problem: Problem) -> Cost:
        """Every tensor is moved once; among the known algorithms, the fewest multiply-adds count.

        Per head and step, the chunked algorithm, with decays per row and per chunk, has 2 * K * V
        (forward) and 5 * K * V (backward), as in linear attention. For a few steps without states,
        products of all pairs of steps are fewer.
        """
        moved = moved_bytes(self.signature.pass_named(pass_name), problem)
        b, n, t, h, k, v = problem.shape(("B", "N", "T", "H", "K", "V"))
        forward = pass_name == "forward"
        adds = (2 if forward else 5) * t * k * v
        states = ("initial_state_dtype", "final_state_dtype")
        if not any(problem.dtype(field).itemsize for field in states):
            length = b * t // max(n, 1)  # pairs are fewest if all sequences are equally long
            pairs = t * (length + 1) // 2
            adds = min(adds, pairs * (k + v if forward else 3 * k + 2 * v))
        unit: Literal["3xhalf", "half"] = (
            "3xhalf" if problem.dtype("dtype").name == "fp32" else "half"
        )
        return Cost(bytes=moved, flops=2 * b * h * adds, unit=unit)


def doc(per_step: bool) -> str:
    """Formula and gradients, for the generated docstring."""
    t = "_t" if per_step else ""
    gw = (
        "gw_t = dd_t/dw_t * sum_v S_{t-1} * G_t"
        if per_step
        else "gw = dd/dw * sum over b, t and v of S_{t-1} * G_t"
    )
    return f"""\
y_t = scale * r_t (S_{{t-1}} + diag(u) k_t v_t^T)
S_t = diag(d{t}) S_{{t-1}} + k_t v_t^T;  S_0 as given, else 0
d{t} = exp(w{t}), with decay_form "raw" exp(-exp(w{t})), with "decay" w{t}

Gradients, with g = scale * gy and n_t = v_t . g_t:
gr_t = S_{{t-1}} g_t + n_t u k_t
G_{{t-1}} = diag(d{t}) G_t + r_t g_t^T;  G_T the gradient of the final state, else 0
gk_t = G_t v_t + n_t u r_t,  gv_t = k_t G_t + (sum_k r u k) g_t
{gw},  gu = sum over b and t of n_t r_t k_t
With cu_seqlens every sequence begins with a state of its own, as if it were a batch row."""


def operator(
    name: str,
    summary: str,
    source: str,
    per_step: bool,
    problems: Mapping[str, tuple[str, ...]],
    aliases: tuple[str, ...],
) -> Operator:
    """Build the operator."""
    declared = signature(per_step)
    return Operator(
        name=name,
        summary=summary,
        source=source,
        doc=doc(per_step),
        signature=declared,
        definition=definition,
        make_inputs=Inputs(per_step),
        cases=CASES,
        cost=LeastWork(declared),
        problems=problems,
        peers=peers,
        scale=scale,
        aliases=aliases,
        slab_dim="B",
        repeats=("B", "N", "H"),
        serial_dims=("T",),
        head_dims=("K", "V"),
        widens=True,
        slow_peers=SLOW_PEERS,
        trained=trained.wkv,
    )
