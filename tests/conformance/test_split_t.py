"""linear_attention's split_t over several rounds, with segments that are partial or empty.

`test_host.py` has sequences shorter than one round of segments. Here the cases have an initial
state, a final state, both or neither; a CTA has fewer features than a head; and warps have padding.
"""

from __future__ import annotations

import pytest
from test_host import (
    BY_RANK,
    H200,
    HOST,
    ROOMY,
    SHUFFLED,
    always_nonfinite,
    compiled,
    run_configs,
)
from tiers import one_of

from kgen.catalogue import open_catalogue
from kgen.model.config import Config, Value
from kgen.model.plan import make_plan
from kgen.model.problem import parse_problem
from kgen.model.record import Fate
from kgen.search.feasible import is_feasible

ENTRY = open_catalogue().entry("linear_attention")
VARIANT = ENTRY.space.variant("forward", "split_t")
BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
# Problem, head_ctas, segment, block_v and batch.
MMA = (
    # The cases have three rounds; two; two, with small sums; two, the second with one segment; two.
    (f"B=1,H=2,T=600,E=24,M=40,dtype=bf16,{BEFORE},{BEHIND}", 4, 64, 32, 32),
    (f"B=1,H=1,T=700,E=80,M=16,dtype=bf16,{BEHIND}", 4, 128, 16, 64),
    (f"B=1,H=1,T=600,E=48,M=40,dtype=bf16,{BEFORE},{BEHIND}", 4, 128, 32, 32),
    ("B=1,H=1,T=1100,E=32,M=48,dtype=bf16", 16, 64, 32, 32),
    (f"B=1,H=1,T=1300,E=32,M=16,dtype=bf16,{BEFORE}", 4, 256, 16, 128),
)
WGMMA = (
    # The cases have four rounds of one warpgroup; a partial block of value features; two rounds of
    # two warpgroups, with one tile of keys and with two; two rounds of the largest number of CTAs.
    (f"B=1,H=2,T=1700,E=48,M=64,dtype=bf16,{BEFORE},{BEHIND}", 4, 128, 64, 32),
    ("B=1,H=1,T=560,E=128,M=88,dtype=bf16", 4, 256, 64, 64),
    (f"B=1,H=1,T=1100,E=64,M=64,dtype=bf16,{BEFORE}", 4, 256, 64, 128),
    (f"B=1,H=1,T=1300,E=96,M=128,dtype=bf16,{BEHIND}", 4, 256, 128, 64),
    ("B=1,H=1,T=2100,E=64,M=64,dtype=bf16", 16, 128, 64, 64),
)
CASES = [
    *one_of(3, [(*case, "mma") for case in MMA]),
    *one_of(3, [(*case, "wgmma") for case in WGMMA]),
]


def config_of(head_ctas: int, segment: int, block_v: int, batch: int, products: str) -> Config:
    values: dict[str, Value] = {
        "head_ctas": head_ctas, "segment": segment, "block_v": block_v, "batch": batch,
        "copy_bytes": 16, "score_terms": 1 + (block_v < 32 or batch == 128), "min_blocks": 1,
        "products": products,
    }  # fmt: skip
    return Config.of("split_t", values)


@pytest.mark.parametrize(("text", "head_ctas", "segment", "block_v", "batch", "products"), CASES)
def test_rounds_and_states(
    text: str, head_ctas: int, segment: int, block_v: int, batch: int, products: str
) -> None:
    signature = ENTRY.operator.signature
    problem = parse_problem(text, signature)
    config = config_of(head_ctas, segment, block_v, batch, products)
    pass_ = signature.pass_named("forward")
    gpu = HOST if products == "mma" else ROOMY
    assert is_feasible(VARIANT, config, pass_, problem, gpu, legality_only=True)
    assert make_plan(VARIANT, config, problem, gpu).launches[-1].grid[0] % head_ctas == 0
    wanted = [(problem, config)]
    for _, _, outcome in run_configs(ENTRY, VARIANT, "host", wanted, (BY_RANK, SHUFFLED)):
        assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


def test_wgmma_stays_inside_its_buffers() -> None:
    """Run under AddressSanitizer; wgmma exceeds the host's profile, so `test_host.py` skips it."""
    text = f"B=1,H=2,T=560,E=56,M=88,dtype=bf16,{BEFORE},{BEHIND}"
    problem = parse_problem(text, ENTRY.operator.signature)
    wanted = [(problem, config_of(4, 128, 64, 64, "wgmma"))]
    [(_, config, outcome)] = run_configs(ENTRY, VARIANT, "host-asan", wanted, (BY_RANK,))
    assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@pytest.mark.parametrize("products", ["mma", "wgmma"])
def test_what_is_not_finite_over_rounds(products: str) -> None:
    """NaN and Inf do not affect CTAs of other segments; the states of later rounds are right."""
    steps = 600 if products == "mma" else 1100  # three rounds
    text = f"B=1,H=2,T={steps},E=24,M=16,dtype=bf16,{BEFORE},{BEHIND}"
    problem = parse_problem(text, ENTRY.operator.signature)
    sizes = (4, 64, 16, 32) if products == "mma" else (4, 128, 64, 64)
    wanted = [(problem, config_of(*sizes, products))]
    outcomes = run_configs(ENTRY, VARIANT, "host", wanted, (BY_RANK, SHUFFLED), always_nonfinite)
    assert [outcome.fate for _, _, outcome in outcomes] == [Fate.VERIFIED], outcomes


@pytest.mark.parametrize(
    "text",
    [
        "B=1,H=8,T=4096,E=64,M=64,dtype=bf16",
        "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
    ],
)
def test_the_compiler_pipelines_wgmma(text: str) -> None:
    """If ptxas serialises wgmma, the kernel is right, but as slow as a kernel without wgmma."""
    problem = parse_problem(text, ENTRY.operator.signature)
    pass_ = ENTRY.operator.signature.pass_named("forward")
    config = next(
        c
        for c in VARIANT.first
        if c.as_dict()["products"] == "wgmma" and is_feasible(VARIANT, c, pass_, problem, H200)
    )
    assert compiled(ENTRY, VARIANT, config, problem).remarks == ()
