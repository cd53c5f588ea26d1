"""Decoding with wkv5 and wkv6: a few steps of their recurrence on states in a pool."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import DTypeField, Signature, Tensor
from kgen.operators import _decode as pooled
from kgen.operators import _trained as trained
from kgen.operators._decode import CASES, decoded, drawn_slots, scaled, untouched, whole_problem
from kgen.operators._wkv import _DECAY_FORM, Inputs
from kgen.operators._wkv import scale as recurrence_scale
from kgen.operators._wkv_definition import definition as recurrence
from kgen.operators._wkv_peers import _arguments, _fla, _plain
from kgen.operators.base import Cost, Operator

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]


def signature(per_step: bool) -> Signature:
    """Dims, dtypes and the pass; w is [B, T, H, K] if `per_step` (wkv6), else [H, K] (wkv5)."""
    what = "dtype of r, or fp32; the decay, as decay_form says."
    w = pooled.rows("w", "K", what, "w_dtype") if per_step else Tensor(
        "w", ("H", "K"), "w_dtype", doc=what
    )
    return pooled.signature(
        inputs=(
            pooled.rows(
                "r", "K",
                "fp32, fp16 or bf16; the last dim contiguous, any strides of B, T and H.",
            ),
            pooled.rows("k", "K", "dtype of r."),
            pooled.rows("v", "V", "dtype of r."),
            w,
            Tensor(
                "u", ("H", "K"), "u_dtype",
                doc="dtype of r, or fp32; the bonus of the current step.",
            ),
        ),
        fields=(
            DTypeField("dtype", ("fp32", "fp16", "bf16")),
            DTypeField("w_dtype", ("dtype", "fp32"), default="fp32"),
            DTypeField("u_dtype", ("dtype", "fp32"), default="dtype"),
        ),
        decay_form=_DECAY_FORM,
    )


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The recurrence of each sequence from the state in its slot."""
    return decoded(recurrence, inputs, scalars)


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The scale of wkv5 and wkv6; see `kgen.operators._decode.scaled`."""
    return scaled(recurrence_scale, inputs, outputs, scalars)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Draws the inputs.

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
        """Draw inputs as for wkv5 and wkv6; `drawn_slots` has the cases of slots."""
        rows = Inputs(self.per_step)(pass_name, whole_problem(problem), case, generator, device)
        return rows | drawn_slots(problem, case, generator, device)


def peers(pass_name: str) -> dict[str, pooled.Peer]:
    """Plain PyTorch, the same compiled, and FLA's recurrent kernel where it is installed; each
    gathers the states from the pool and scatters the new ones.
    """
    import torch

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    functions: dict[str, pooled.Function] = {
        "eager": _plain,
        "torch.compile": torch.compile(_plain, dynamic=False),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("fla"):
        functions["fla_fused_recurrent"] = _fla("fused_recurrent_rwkv6")
    return {name: pooled.stateful(each, _arguments) for name, each in functions.items()}


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
    t = "_t" if per_step else ""

    def cost(pass_name: str, problem: Problem) -> Cost:
        return pooled.least_work(declared, 3, problem)

    return Operator(
        name=name,
        summary=summary,
        source=source,
        doc=f"""\
y_t = scale * r_t (S_{{t-1}} + diag(u) k_t v_t^T)
S_t = diag(d{t}) S_{{t-1}} + k_t v_t^T
d{t} = exp(w{t}), with decay_form "raw" exp(-exp(w{t})), with "decay" w{t}

{pooled.DOC}""",
        signature=declared,
        definition=definition,
        make_inputs=DecodeInputs(per_step),
        cases=CASES,
        cost=cost,
        problems=problems,
        peers=peers,
        scale=scale,
        aliases=aliases,
        slab_dim="H",
        repeats=("B", "S", "H"),
        serial_dims=("T",),
        head_dims=("K", "V"),
        widens=True,
        untouched=untouched,
        trained=trained.wkv,
    )
