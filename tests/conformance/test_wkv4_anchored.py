"""wkv4's backward `anchored`: segments with a common anchor, segments whose keys are too far apart.

`test_host.py` draws configs of all parameters. Here every case has this variant: each dtype and
form of w, a partial last round, a partial tile, and parts of T. With the input sets `large_keys`
and `nonfinite` the kernel takes the steps of most segments one by one. Other inputs here are faint
or large: earlier forms of this kernel lost the gradients of faint inputs, and had infinite
gradients of large inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_host import BY_RANK, ROOMY, demand_verified, run_configs

from kgen.catalogue import open_catalogue
from kgen.model.config import Value
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.operators.base import Operator
from kgen.operators.wkv4 import make_inputs

CONFIG: dict[str, Value] = {
    "lanes": 8, "vec": 2, "segments": 4, "steps": 8, "prefetch": False, "min_blocks": 1,
    "splits": 1,
}  # fmt: skip
CASES: tuple[tuple[str, dict[str, Value]], ...] = (
    ("B=2,T=90,C=12,dtype=fp32", {}),
    ("B=1,T=150,C=24,dtype=bf16", {"vec": 1, "prefetch": True}),
    ("B=1,T=77,C=36,dtype=fp32,decay_form=raw",
     {"lanes": 32, "vec": 1, "segments": 2, "steps": 4}),
    ("B=1,T=67,C=64,dtype=fp16,w_dtype=dtype",
     {"lanes": 32, "segments": 2, "steps": 4, "prefetch": True}),
    # Slow decays and many steps: an error in the same direction at every step shows in gw.
    ("B=1,T=300,C=20,dtype=fp32", {"vec": 4, "segments": 16, "steps": 4, "prefetch": True}),
    # Parts of T with several rounds, the last round partial; parts with one round.
    ("B=2,T=300,C=12,dtype=fp32", {"segments": 2, "steps": 4, "lanes": 32, "vec": 1, "splits": 4}),
    ("B=1,T=129,C=16,dtype=bf16,decay_form=raw", {"splits": 8, "prefetch": True}),
    ("B=3,T=65,C=16,dtype=fp16", {"splits": 2}),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "changed"),
    [pytest.param(*case, marks=pytest.mark.slow if i > 2 else ()) for i, case in enumerate(CASES)],
)
def test_gradients_by_one_anchor(text: str, changed: dict[str, Value]) -> None:
    entry = open_catalogue().entry("wkv4")
    variant, signature = entry.space.variant("backward", "anchored"), entry.operator.signature
    problem, config = parse_problem(text, signature), variant.config({**CONFIG, **changed})
    demand_verified(entry, variant, problem, config, ROOMY)


Inputs = dict[str, torch.Tensor]


def _faint_values(x: Inputs, generator: torch.Generator) -> None:
    x["v"] *= 1e-30
    x["k"] *= 8


def _faint_gradients(x: Inputs, generator: torch.Generator) -> None:
    x["gy"] *= 1e-30
    x["k"] *= 8


def _gradients_of_all_sizes(x: Inputs, generator: torch.Generator) -> None:
    x["gy"] *= 10 ** (-34 * torch.rand(x["gy"].shape, generator=generator))
    x["k"] *= 7


def _late_gradients(x: Inputs, generator: torch.Generator) -> None:
    x["gy"][:, : x["gy"].shape[1] // 2] = 0
    x["k"] *= 8
    x["k"][:, ::5] -= 30


def _demand_verified(
    change: Callable[[Inputs, torch.Generator], None], changed_case: str
) -> None:
    """Verify with the inputs of one case changed, with both kinds of tiles and with parts of T."""

    def drawn(
        pass_name: str, problem: Problem, case: str, generator: torch.Generator,
        device: torch.device,
    ) -> Inputs:
        inputs = make_inputs(pass_name, problem, case, generator, device)
        if case == changed_case:
            change(inputs, generator)
        return inputs

    def changed(operator: Operator) -> Operator:
        own = () if changed_case == "normal" else (changed_case,)
        return replace(operator, make_inputs=drawn, cases=own)

    entry = open_catalogue().entry("wkv4")
    variant, signature = entry.space.variant("backward", "anchored"), entry.operator.signature
    problem = parse_problem("B=2,T=130,C=48,dtype=fp32", signature)
    for other in ({}, {"prefetch": True}, {"splits": 2}):
        wanted = [(problem, variant.config({**CONFIG, **other}))]
        for _, config, outcome in run_configs(
            entry, variant, "host", wanted, (BY_RANK,), changed
        ):
            assert outcome.fate is Fate.VERIFIED, f"{config.label}\n{outcome.reason}"


@pytest.mark.parametrize(
    "change", [_faint_values, _faint_gradients, _gradients_of_all_sizes, _late_gradients]
)
def test_faint_gradients_are_not_lost(
    change: Callable[[Inputs, torch.Generator], None]
) -> None:
    """Keys differ by tens, and values go down to the smallest that a certificate distinguishes."""
    _demand_verified(change, "normal")


def _fast_decays(x: Inputs, generator: torch.Generator) -> None:
    """Fast decays, so that no state outweighs the smallest keys of a segment."""
    x["w"] = -20 - 30 * torch.rand(x["w"].shape, generator=generator)


def _large_bonus(x: Inputs, generator: torch.Generator) -> None:
    _fast_decays(x, generator)
    x["u"] = 15 + 15 * torch.rand(x["u"].shape, generator=generator)
    x["k"] *= 7


def _keys_far_apart(x: Inputs, generator: torch.Generator) -> None:
    _fast_decays(x, generator)
    x["k"] *= 10


def _large_later_gradients(x: Inputs, generator: torch.Generator) -> None:
    """Large gradients of the first step of every second segment only."""
    _fast_decays(x, generator)
    x["k"] *= 10
    steps = torch.arange(x["gy"].shape[1])
    x["gy"][:, steps % 16 != 8] = 0


def _very_large_gradients(x: Inputs, generator: torch.Generator) -> None:
    x["gy"] *= 1e26
    x["k"] *= 4


@pytest.mark.parametrize(
    "change", [_large_bonus, _keys_far_apart, _large_later_gradients, _very_large_gradients]
)
def test_large_gradients_do_not_overflow(
    change: Callable[[Inputs, torch.Generator], None]
) -> None:
    """Values and gradients are 1e4, and exponents are so far apart that gradients are infinite in
    the unit of their segment; in some cases only gradients of later segments are.
    """
    _demand_verified(change, "huge")
