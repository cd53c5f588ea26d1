"""wkv7's warp_specialized_segments with several warps of each role, ragged ends, packed sequences.

`test_host.py` has one warp of each role, and short sequences with mostly empty segments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from test_host import BY_RANK, SHUFFLED, run_configs
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.check.case import NORMAL, SHARED, Case
from kgen.check.schedule import Schedule
from kgen.model.config import Config, Value
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.operators.base import Operator

BEFORE, PACKED = "initial_state_dtype=fp32", "cu_seqlens_dtype=int64"
BF16 = "dtype=bf16,w_dtype=bf16"
# Problem; segments; consumers of the last kernel, producers, consumers of the first kernel; stages;
# elements per copy.
CASES = (
    (f"B=1,H=2,T=150,K=64,V=40,{BF16},decay_form=log,{BEFORE}", 3, (1, 4, 8), 2, 8),
    (f"B=1,H=1,T=264,K=64,V=64,{BF16},decay_form=clamp", 8, (4, 4, 8), 2, 8),
    (f"B=2,H=1,T=128,K=48,V=16,{BF16},decay_form=raw,{BEFORE}", 4, (1, 2, 2), 4, 8),
    ("B=1,H=2,T=97,K=20,V=18,dtype=bf16,decay_form=log", 3, (2, 4, 1), 2, 2),
    (f"B=1,H=1,T=100,K=7,V=5,{BF16},decay_form=clamp,{BEFORE}", 6, (1, 1, 2), 2, 1),
    (f"B=1,H=1,T=52,K=128,V=16,{BF16},decay_form=raw", 3, (1, 4, 4), 2, 8),
    (f"B=1,N=3,H=2,T=150,K=48,V=32,{BF16},decay_form=raw,{BEFORE},{PACKED}", 3, (2, 2, 4), 4, 8),
)  # fmt: skip
AFTER = "final_state_dtype=fp32"
# The same for the backward pass; further parameters.
BACKWARD: tuple[tuple[str, int, tuple[int, int, int], int, int, dict[str, Value]], ...] = (
    (f"B=1,H=2,T=150,K=64,V=40,{BF16},decay_form=log,{AFTER}", 3, (1, 4, 8), 2, 8, {}),
    (f"B=2,H=1,T=264,K=16,V=64,{BF16},decay_form=clamp", 8, (4, 4, 8), 2, 8, {}),
    (f"B=2,H=1,T=128,K=48,V=16,{BF16},decay_form=raw,{AFTER}", 4, (1, 2, 2), 4, 8, {}),
    (f"B=1,N=3,H=2,T=150,K=48,V=32,{BF16},decay_form=raw,{AFTER},{PACKED}", 3, (2, 2, 4), 4, 8,
     {"level_loop": 1}),
    (f"B=1,H=1,T=97,K=20,V=50,{BF16},decay_form=clamp", 3, (2, 4, 2), 2, 2, {"quotients": 1}),
    (f"B=1,N=3,H=1,T=200,K=64,V=64,{BF16},decay_form=clamp,{AFTER},{PACKED}", 4, (4, 4, 8), 2, 8,
     {"quotients": 1, "state_bytes": 2}),
    (f"B=1,H=1,T=230,K=64,V=64,{BF16},decay_form=clamp,{AFTER}", 3, (2, 4, 4), 2, 8,
     {"quotients": 1, "consumer_scores": 1, "chunk": 32, "state_bytes": 2, "state_row_warps": 8}),
)  # fmt: skip
QUOTIENTS = (
    (f"B=1,H=1,T=150,K=64,V=40,{BF16},decay_form=clamp,{BEFORE}", 3, (1, 4, 8), 2, 8),
    (f"B=1,N=3,H=2,T=150,K=48,V=32,{BF16},decay_form=clamp,{BEFORE},{PACKED}", 3, (2, 2, 4), 4, 8),
)  # fmt: skip


def certify(
    text: str, segments: int, warps: tuple[int, int, int], stages: int, vec: int,
    orders: tuple[int, ...] = (BY_RANK, SHUFFLED),
    changed: Callable[[Operator], Operator] = lambda operator: operator, pass_name: str = "forward",
    others: Mapping[str, Value] = MappingProxyType({}),
) -> None:  # fmt: skip
    entry = open_catalogue().entry("wkv7")
    variant = entry.space.variant(pass_name, "warp_specialized_segments")
    problem = parse_problem(text, entry.operator.signature)
    values: dict[str, Value] = dict(
        zip(("warps", "row_warps", "state_warps"), warps, strict=True))
    values |= {"segments": segments, "stages": stages, "vec": vec, "min_blocks": 1, **others}
    if pass_name == "backward":
        values |= {"chunk_warps": 1, "chunk_blocks": 1, "state_row_warps": values["row_warps"]}
        values |= dict(others)
    config = Config.of(variant.name, values)
    for _, _, outcome in run_configs(entry, variant, "host", [(problem, config)], orders, changed):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@pytest.mark.parametrize(("text", "segments", "warps", "stages", "vec"), one_of(2, CASES))
def test_segments(
    text: str, segments: int, warps: tuple[int, int, int], stages: int, vec: int
) -> None:
    certify(text, segments, warps, stages, vec)


@pytest.mark.parametrize(("text", "segments", "warps", "stages", "vec"), one_of(2, QUOTIENTS))
def test_quotients(
    text: str, segments: int, warps: tuple[int, int, int], stages: int, vec: int
) -> None:
    certify(text, segments, warps, stages, vec, others={"quotients": 1})


@pytest.mark.parametrize(
    ("text", "segments", "warps", "stages", "vec", "others"), one_of(3, BACKWARD)
)
def test_backward(
    text: str, segments: int, warps: tuple[int, int, int], stages: int, vec: int,
    others: dict[str, Value],
) -> None:  # fmt: skip
    certify(text, segments, warps, stages, vec, pass_name="backward", others=others)


def transitions_overflow(operator: Operator) -> Operator:
    """Change the operator: a and b let the transitions of zero states and gradients overflow."""

    def inputs(
        pass_name: str, problem: Problem, _: str, drawn: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        made = operator.make_inputs(pass_name, problem, "normal", drawn, device)
        steps = made["v"].shape[1]
        made["v"][:, : 2 * steps // 3] = 0.0
        if pass_name == "backward":
            made["gy"][:, steps // 3 :] = 0.0
        for name in ("a", "b"):
            made[name][:, steps // 3 : 2 * steps // 3] = 2.0**20
        return made

    return replace(operator, make_inputs=inputs)


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_transition_that_overflows(pass_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inf times a state of zero is NaN; the steps before the segment make the state zero."""
    by_all = Schedule.certify

    def own(schedule: Schedule, seed: int, constants: Collection[str]) -> list[Case]:
        names = (NORMAL, *schedule.operator.cases)  # in other cases factors let y overflow as well
        cases = by_all(schedule, seed, constants)
        return [
            case for case in cases
            if case.name in names and not case.opposite and case.layout != SHARED
        ]

    monkeypatch.setattr(Schedule, "certify", own)
    text = f"B=1,H=1,T=150,K=16,V=16,{BF16},decay_form=clamp"
    for quotients in (0, 1):
        certify(text, 3, (1, 1, 2), 2, 8, (BY_RANK,), transitions_overflow, pass_name,
                others={"quotients": quotients})
