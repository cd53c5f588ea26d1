"""timex skips taps that are 0, but not if they are multiplied by NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_host import BY_RANK, HOST, run_configs
from test_timex_fft import ENTRY, SIZES

from kgen.model.config import Value
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.operators.base import Operator
from kgen.search.feasible import is_feasible

# Parameters of `toeplitz_mma` that decide which columns a step multiplies.
STEPS: tuple[dict[str, Value], ...] = (
    {"m_tiles": 2, "t_fold": 1, "promotions": 1, "n_tiles": 1},
    {"m_tiles": 3, "t_fold": 2, "promotions": 1, "n_tiles": 1},
    {"m_tiles": 4, "t_fold": 1, "promotions": 2, "n_tiles": 1},
)
DTYPES = ("dtype=fp32", "dtype=bf16,w_dtype=fp32", "dtype=fp16")


def with_short_filters(operator: Operator) -> Operator:
    """In channel 0 all taps except lag 0 are 0, in channel 1 most taps, in channel 2 no tap."""

    def make_inputs(
        pass_name: str, problem: Problem, case: str, generator: torch.Generator,
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        inputs = dict(operator.make_inputs(pass_name, problem, case, generator, device))
        w = inputs["w"]
        channels, steps = w.shape
        for channel in range(channels):
            # With one lag less than 98 there would be one step of columns less, for each of STEPS.
            kept = (1, min(98, steps), steps)[channel % 3]
            w[channel, : steps - kept] = 0
        return inputs

    return replace(operator, make_inputs=make_inputs)


def verify(pass_name: str, variant_name: str, problem_text: str, values: dict[str, Value]) -> None:
    """Verify a config on the host, with short filters."""
    variant, signature = ENTRY.space.variant(pass_name, variant_name), ENTRY.operator.signature
    problem, config = parse_problem(problem_text, signature), variant.config(values)
    assert is_feasible(variant, config, signature.pass_named(pass_name), problem, HOST)
    [(_, _, outcome)] = run_configs(
        ENTRY, variant, "host", [(problem, config)], (BY_RANK,), changed=with_short_filters,
        sizes=SIZES)
    assert outcome.fate is Fate.VERIFIED, outcome.reason


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_fft_leaves_out_taps_that_are_zero_and_no_nan(pass_name: str) -> None:
    """The case `nonfinite` has NaN and Inf at taps of 0: 0 * NaN must reach the output."""
    of_pass = {"parked": False} if pass_name == "backward" else {}
    verify(pass_name, "fft", "B=3,C=3,T=500,dtype=fp32",
           {"points": 512, "per_thread": 8, "rows": 2, "min_blocks": 1, **of_pass})


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("steps", STEPS, ids=lambda steps: f"m{steps['m_tiles']}")
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_toeplitz_mma_leaves_out_taps_that_are_zero_and_no_nan(
    pass_name: str, steps: dict[str, Value], dtypes: str
) -> None:
    of_pass: dict[str, Value] = {"t_blocks": 1} if pass_name == "forward" else {
        "tap_diagonals": 4, "tap_k": 16, "tap_fold": 1, "tap_warps": 2}
    verify(pass_name, "toeplitz_mma", f"B=3,C=3,T=243,{dtypes}",
           {**steps, **of_pass, "promotions": steps["promotions"] if "fp32" in dtypes[:10] else 1,
            "warps": 2, "min_blocks": 1, "skip_zeros": True})
