"""wkv7's backward pass on fp64 tensor cores: fp32, gradients of states, fp16, any decay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_host import BY_RANK, H200, compiled, demand_verified, run_configs

from kgen.catalogue import open_catalogue
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.operators.base import Operator
from kgen.search.feasible import is_feasible

STATES = "initial_state_dtype=fp32,final_state_dtype=fp32"
PACKED = "cu_seqlens_dtype=int64"
BF16, FP16 = "dtype=bf16,w_dtype=fp32", "dtype=fp16,w_dtype=fp32"
# Problem; elements per load; consumers and producers of the first kernel; warps of the second.
CASES = (
    (f"B=1,H=2,T=37,K=64,V=64,{BF16},decay_form=log", 8, 1, 1, 1),
    (f"B=1,N=4,H=1,T=70,K=48,V=32,{BF16},decay_form=raw,{STATES},{PACKED}", 8, 2, 1, 2),
    (f"B=2,H=1,T=19,K=20,V=36,{FP16},decay_form=log,{STATES}", 4, 1, 2, 1),
    (f"B=2,H=1,T=33,K=18,V=18,{BF16},decay_form=clamp", 2, 2, 1, 1),
    (f"B=1,H=1,T=17,K=7,V=5,{FP16},decay_form=raw", 1, 1, 1, 1),
    (f"B=1,H=1,T=67,K=16,V=128,{BF16},decay_form=clamp,{STATES}", 8, 4, 1, 1),
    (f"B=1,N=3,H=1,T=41,K=64,V=40,dtype=fp16,w_dtype=fp16,decay_form=log,{PACKED}", 8, 1, 4, 4),
    (f"B=1,H=1,T=50,K=64,V=16,{BF16},decay_form=log,{STATES}", 8, 1, 2, 2),
    (f"B=1,N=3,H=1,T=49,K=64,V=36,dtype=fp32,decay_form=raw,{STATES},{PACKED}", 4, 1, 4, 4),
    ("B=1,H=2,T=33,K=24,V=18,dtype=fp32,decay_form=clamp", 2, 2, 1, 2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "vec", "warps", "row_warps", "chunk_warps"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 3 else ()) for i, case in enumerate(CASES)],
)
def test_fp64(text: str, vec: int, warps: int, row_warps: int, chunk_warps: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "warp_specialized_fp64")
    problem = parse_problem(text, entry.operator.signature)
    values = {"vec": vec, "warps": warps, "row_warps": row_warps, "chunk_warps": chunk_warps}
    config = Config.of(variant.name, values | {"min_blocks": 1, "chunk_blocks": 1})
    demand_verified(entry, variant, problem, config)


def strongest_decays(operator: Operator) -> Operator:
    """Change the operator: most steps of a key decay by 1e-13, 1e-35 or to 0.

    Products of a few steps leave the range of fp64; quotients of them would be Inf or NaN.
    """

    def inputs(
        pass_name: str, problem: Problem, case: str, drawn: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        made = operator.make_inputs(pass_name, problem, case, drawn, device)
        table = torch.tensor([0.0, -1e-4, -0.5, -30.0, -80.0, -80.0, float("-inf")], device=device)
        choice = torch.randint(0, len(table), made["w"].shape, generator=drawn, device=device)
        made["w"] = torch.where(made["w"].isnan(), made["w"], table[choice].to(made["w"].dtype))
        return made

    return replace(operator, make_inputs=inputs)


@pytest.mark.parametrize(
    ("dtypes", "vec"), [(BF16, 8), pytest.param("dtype=fp32", 4, marks=pytest.mark.slow)]
)
def test_the_strongest_decays(dtypes: str, vec: int) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "warp_specialized_fp64")
    text = f"B=1,H=2,T=70,K=16,V=16,{dtypes},decay_form=log,{STATES}"
    problem = parse_problem(text, entry.operator.signature)
    values = {"vec": vec, "warps": 1, "row_warps": 1, "chunk_warps": 1}
    config = Config.of(variant.name, values | {"min_blocks": 1, "chunk_blocks": 1})
    for _, _, outcome in run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK,), strongest_decays
    ):
        assert outcome.fate is Fate.VERIFIED, outcome.reason


@pytest.mark.parametrize(
    "decay_form", ["log", *(pytest.param(x, marks=pytest.mark.slow) for x in ("raw", "clamp"))]
)
@pytest.mark.parametrize("dtypes", [BF16, "dtype=fp32"])
def test_nothing_spills(dtypes: str, decay_form: str) -> None:
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant("backward", "warp_specialized_fp64")
    text = f"B=8,T=4096,H=32,K=64,V=64,{dtypes},decay_form={decay_form},{STATES}"
    problem = parse_problem(text, entry.operator.signature)
    pass_ = entry.operator.signature.pass_named("backward")
    config = next(x for x in variant.first if is_feasible(variant, x, pass_, problem, H200))
    for name, used in compiled(entry, variant, config, problem).resources:
        assert used.spill_bytes == 0, name
