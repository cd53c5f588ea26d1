"""Decoding with RWKV-7: wkv7 of a few steps, with states in a pool that are updated in place."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kgen.model.problem import Problem
from kgen.model.signature import DTypeField
from kgen.operators import _decode as pooled
from kgen.operators import _trained as trained
from kgen.operators._decode import (
    CASES,
    INDICES,
    decoded,
    drawn_slots,
    scaled,
    untouched,
    whole_problem,
)
from kgen.operators._wkv7_definition import definition as recurrence
from kgen.operators._wkv7_inputs import make_inputs as make_rows
from kgen.operators._wkv7_peers import _arguments, _by_steps, _fla
from kgen.operators._wkv7_signature import DECAY_FORM
from kgen.operators.base import Cost, Operator
from kgen.operators.wkv7 import scale as recurrence_scale

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]

_DOC = f"""\
sa_t = a_t S_{{t-1}}
S_t = diag(d_t) S_{{t-1}} + b_t sa_t^T + k_t v_t^T
y_t = scale * r_t S_t
d_t = exp(w_t), with decay_form "raw" exp(-exp(w_t)), with "clamp"
exp(-exp(-0.5) * sigmoid(w_t))

{pooled.DOC}"""

SIGNATURE = pooled.signature(
    inputs=(
        pooled.rows(
            "r", "K", "fp32, fp16 or bf16; the last dim contiguous, any strides of B, T and H."
        ),
        pooled.rows("w", "K", "dtype of r, or fp32; the decay, as decay_form says.", "w_dtype"),
        pooled.rows("k", "K", "dtype of r."),
        pooled.rows("v", "V", "dtype of r."),
        pooled.rows("a", "K", "dtype of r; the key that is read and replaced, often -kk."),
        pooled.rows("b", "K", "dtype of r; the key that is replaced, often kk * gate."),
    ),
    fields=(
        DTypeField("dtype", ("fp32", "fp16", "bf16")),
        DTypeField("w_dtype", ("dtype", "fp32"), default="fp32"),
    ),
    decay_form=DECAY_FORM,
)


def definition(
    pass_name: str, inputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The recurrence of each sequence from the state in its slot."""
    return decoded(recurrence, inputs, scalars)


def scale(
    pass_name: str, inputs: Tensors, outputs: Tensors, scalars: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """The scale of wkv7; see `kgen.operators._decode.scaled`."""
    return scaled(recurrence_scale, inputs, outputs, scalars)


def make_inputs(
    pass_name: str,
    problem: Problem,
    case: str,
    generator: torch.Generator,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Draw inputs as for wkv7; `drawn_slots` has the cases of slots."""
    rows = make_rows(pass_name, whole_problem(problem), case, generator, device)
    return rows | drawn_slots(problem, case, generator, device)


def cost(pass_name: str, problem: Problem) -> Cost:
    """The work of moving every row once, and of reading and writing the used states once."""
    return pooled.least_work(SIGNATURE, 5, problem)


def peers(pass_name: str) -> dict[str, pooled.Peer]:
    """Plain PyTorch, the same compiled, and FLA's recurrent kernel where it is installed; each
    gathers the states from the pool and scatters the new ones.
    """
    import torch

    # See rmsnorm's peers: past a number of recompilations Dynamo silently runs a function eagerly.
    torch._dynamo.reset()
    functions: dict[str, pooled.Function] = {
        "eager": _by_steps,
        "torch.compile": torch.compile(_by_steps, dynamic=False),
    }
    if torch.cuda.is_available() and importlib.util.find_spec("fla"):
        functions["fla_fused_recurrent"] = _fla("fused_recurrent_rwkv7")
    return {name: pooled.stateful(each, _arguments) for name, each in functions.items()}


_SERVED = "H=32,K=64,V=64,dtype=bf16,decay_form=clamp"

OPERATOR = Operator(
    name="wkv7_decode",
    summary="RWKV-7 time mixing of a few steps, with the states of a pool updated in place.",
    source="Peng et al. 2025, arXiv:2503.14456.",
    doc=_DOC,
    signature=SIGNATURE,
    definition=definition,
    make_inputs=make_inputs,
    cases=CASES,
    cost=cost,
    problems={
        "cuda": (
            f"B=128,S=128,T=1,{_SERVED}",
            f"B=1,S=1,T=1,{_SERVED}",
            f"B=128,S=1024,T=1,{_SERVED},{INDICES}",
            f"B=32,S=64,T=4,{_SERVED},{INDICES}",
            "B=2,S=3,T=5,H=4,K=100,V=72,dtype=fp32",
        ),
        "host": (
            "B=2,S=2,T=1,H=2,K=16,V=16,dtype=fp32",
            f"B=3,S=5,T=3,H=1,K=9,V=5,dtype=bf16,decay_form=clamp,{INDICES}",
        ),
    },
    peers=peers,
    scale=scale,
    aliases=("rwkv7_decode",),
    slab_dim="H",
    repeats=("B", "S", "H"),
    serial_dims=("T",),
    head_dims=("K", "V"),
    widens=True,
    untouched=untouched,
    trained=trained.wkv7,
)
