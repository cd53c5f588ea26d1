"""wkv5's and wkv6's backward pass by halving: ragged extents, groups of warps, segments of T."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_host import BY_RANK, demand_verified, run_configs
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.operators.base import Operator

FINAL = "final_state_dtype=fp32"
PACKED = "cu_seqlens_dtype=int32"
# Operator and problem; groups of warps; bytes per copy; terms of the state's gradient.
CASES = (
    ("wkv6", "B=1,H=2,T=150,K=64,V=64,decay_form=raw", 2, 16, 1),
    ("wkv6", f"B=1,H=1,T=77,K=64,V=48,decay_form=log,{FINAL}", 1, 16, 2),
    ("wkv6", f"B=1,N=5,H=2,T=170,K=32,V=64,decay_form=log,{PACKED},{FINAL}", 2, 16, 1),
    ("wkv6", "B=2,H=1,T=33,K=20,V=18,decay_form=raw", 2, 4, 1),
    ("wkv6", "B=1,H=1,T=40,K=7,V=5,decay_form=log,u_dtype=fp32", 2, 2, 1),
    ("wkv6", "B=1,H=1,T=20,K=128,V=16,decay_form=log", 1, 16, 1),
    ("wkv6", "B=1,H=1,T=50,K=16,V=128,decay_form=raw", 2, 8, 2),
    ("wkv5", f"B=2,H=1,T=100,K=64,V=64,decay_form=raw,{FINAL}", 2, 16, 1),
    ("wkv5", f"B=1,N=4,H=1,T=90,K=48,V=24,decay_form=log,{PACKED}", 1, 16, 1),
)  # fmt: skip
# The same with segments of T. Some segments have a partial chunk or no step, also with packed
# sequences.
SEGMENTS = (
    ("wkv6", f"B=1,H=2,T=250,K=64,V=40,decay_form=raw,{FINAL}", 2, 16, 1, 3),
    ("wkv6", "B=1,H=1,T=264,K=32,V=80,decay_form=log", 1, 8, 2, 5),
    ("wkv6", "B=2,H=1,T=97,K=20,V=18,decay_form=raw", 2, 4, 1, 3),
    ("wkv6", f"B=1,N=3,H=2,T=170,K=48,V=32,decay_form=log,{PACKED},{FINAL}", 2, 16, 1, 3),
    ("wkv6", f"B=1,H=1,T=100,K=7,V=5,decay_form=log,{FINAL}", 1, 2, 1, 6),
    ("wkv6", "B=1,H=1,T=40,K=128,V=16,decay_form=raw", 1, 16, 1, 4),
    ("wkv5", f"B=1,H=2,T=250,K=40,V=72,decay_form=raw,{FINAL}", 2, 16, 2, 3),
    ("wkv5", f"B=1,N=3,H=2,T=170,K=16,V=32,decay_form=log,{PACKED}", 1, 16, 1, 4),
    ("wkv5", "B=2,H=1,T=70,K=18,V=128,decay_form=log", 1, 4, 1, 2),
)  # fmt: skip


@pytest.mark.parametrize(("operator", "text", "groups", "copy_bytes", "terms"), one_of(2, CASES))
def test_backward_by_halves(
    operator: str, text: str, groups: int, copy_bytes: int, terms: int
) -> None:
    demand("chunk_halving", operator, text, groups, copy_bytes, terms)


@pytest.mark.parametrize(
    ("operator", "text", "groups", "copy_bytes", "terms", "segments"), one_of(3, SEGMENTS)
)
def test_segments(
    operator: str, text: str, groups: int, copy_bytes: int, terms: int, segments: int
) -> None:
    demand("chunk_halving_segments", operator, text, groups, copy_bytes, terms, segments=segments)


@pytest.mark.parametrize(
    ("operator", "text", "groups", "copy_bytes", "terms"),
    one_of(2, [c for c in CASES if c[3] == 16]),
)
def test_row_copies(operator: str, text: str, groups: int, copy_bytes: int, terms: int) -> None:
    demand("chunk_halving", operator, text, groups, copy_bytes, terms, row_copies=True)


@pytest.mark.parametrize(
    ("operator", "text", "groups", "copy_bytes", "terms", "segments"), [SEGMENTS[0], SEGMENTS[7]]
)
def test_row_copies_of_segments(
    operator: str, text: str, groups: int, copy_bytes: int, terms: int, segments: int
) -> None:
    more = {"segments": segments, "row_copies": True}
    demand("chunk_halving_segments", operator, text, groups, copy_bytes, terms, **more)


@pytest.mark.parametrize("name", ["k", "gy", "gfinal_state"])
def test_an_inf_reaches_other_segments(name: str) -> None:
    """0 * Inf is NaN: the product of a segment's decays may be 0 although no single decay is 0."""

    def with_inf(operator: Operator) -> Operator:
        def make_inputs(
            pass_name: str, problem: Problem, case: str, generator: torch.Generator,
            device: torch.device,
        ) -> dict[str, torch.Tensor]:  # fmt: skip
            chosen = "normal" if case == "nonfinite" else case
            inputs = operator.make_inputs(pass_name, problem, chosen, generator, device)
            value = inputs[name]
            if case == "nonfinite" and value.numel():
                inputs["w"].clamp_(min=1.0)
                for positive in ("r", "k", "v", "gy"):  # so that no sum has both Inf and -Inf
                    inputs[positive].abs_()
                steps = problem.shape(("T",))[0]
                last = min(steps, -(-steps // 128) * 32) - 1  # last step of the first segment
                at = {"k": last, "gy": steps - 1, "gfinal_state": 0}[name]
                value[0, at, 0, 3] = torch.inf
            return inputs

        return replace(operator, make_inputs=make_inputs, cases=("huge", "nonfinite"))

    entry = open_catalogue().entry("wkv6")
    variant = entry.space.variant("backward", "chunk_halving_segments")
    text = f"B=1,H=1,T=160,K=32,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,{FINAL}"
    problem = parse_problem(text, entry.operator.signature)
    config = variant.config({
        "groups": 2, "stages": 2, "copy_bytes": 16, "min_blocks": 1, "gradient_terms": 1,
        "segments": 4,
    })  # fmt: skip
    for _, _, outcome in run_configs(
        entry, variant, "host", [(problem, config)], (BY_RANK,), with_inf
    ):
        assert outcome.fate is Fate.VERIFIED, outcome.reason


def demand(
    name: str, operator: str, text: str, groups: int, copy_bytes: int, terms: int, **more: int
) -> None:
    entry = open_catalogue().entry(operator)
    variant = entry.space.variant("backward", name)
    problem = parse_problem(f"{text},dtype=bf16,w_dtype=bf16", entry.operator.signature)
    config = variant.config({
        "groups": groups, "stages": 2, "copy_bytes": copy_bytes, "min_blocks": 1,
        "gradient_terms": terms, **more,
    })  # fmt: skip
    demand_verified(entry, variant, problem, config)
