"""linear_attention's wgmma_split_bf16 over several chunks, ragged ends and features, and states.

The CTAs need more shared memory than the host's profile has, so its limits are lifted here. The
input sets of a certificate include sequences shorter than a chunk and, if H > 1, tensors with the
layout [B, T, H] in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_host import (
    BY_RANK,
    H200,
    ROOMY,
    SHUFFLED,
    always_nonfinite,
    compiled,
    run_configs,
    with_other_scalars,
)
from tiers import one_of

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue
from kgen.check.case import NORMAL, Case
from kgen.check.schedule import Schedule
from kgen.model.config import Config
from kgen.model.problem import Problem, parse_problem
from kgen.model.record import Fate
from kgen.model.space import Variant
from kgen.operators.base import Operator
from kgen.search.feasible import is_feasible

ENTRY = open_catalogue().entry("linear_attention")
BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
TF32 = "dtype=fp32,product_dtype=tf32"
# Pass, problem, number of terms, bytes of a load.
CASES = (
    ("forward", "B=2,H=2,T=200,E=64,M=64,dtype=fp32", 3, 16),
    ("forward", f"B=1,H=1,T=150,E=40,M=72,dtype=fp32,{BEFORE},{BEHIND}", 3, 16),
    ("forward", f"B=1,H=1,T=321,E=64,M=48,{TF32},{BEFORE},{BEHIND}", 2, 16),
    ("forward", f"B=1,H=1,T=64,E=33,M=65,dtype=fp32,{BEFORE}", 3, 4),
    ("backward", "B=1,H=2,T=130,E=64,M=64,dtype=fp32", 3, 16),
    ("backward", f"B=1,H=1,T=100,E=40,M=64,dtype=fp32,{BEFORE},{BEHIND}", 3, 16),
    ("backward", f"B=1,H=1,T=100,E=33,M=24,{TF32},{BEHIND}", 2, 4),
    ("forward", f"B=1,H=1,T=129,E=14,M=30,dtype=fp32,{BEHIND}", 3, 8),
)


def case_of(
    pass_name: str, text: str, terms: int, copy_bytes: int
) -> tuple[Variant, Problem, Config]:
    variant = ENTRY.space.variant(pass_name, "wgmma_split_bf16")
    signature = ENTRY.operator.signature
    problem = parse_problem(text, signature)
    config = Config.of(variant.name, {"terms": terms, "copy_bytes": copy_bytes})
    pass_ = signature.pass_named(pass_name)
    assert is_feasible(variant, config, pass_, problem, ROOMY, legality_only=True)
    return variant, problem, config


def check(
    case: tuple[str, str, int, int],
    compiler: str = "host",
    orders: tuple[int, ...] = (BY_RANK, SHUFFLED),
    changed: Callable[[Operator], Operator] = lambda operator: operator,
    include: Path | None = None,
) -> None:
    variant, problem, config = case_of(*case)
    wanted = [(problem, config)]
    [(_, _, outcome)] = run_configs(
        ENTRY, variant, compiler, wanted, orders, changed, include=include
    )
    assert outcome.fate is Fate.VERIFIED, f"{problem} {config.label}\n{outcome.reason}"


@pytest.mark.parametrize(("pass_name", "text", "terms", "copy_bytes"), one_of(2, CASES))
def test_chunks_and_states(pass_name: str, text: str, terms: int, copy_bytes: int) -> None:
    check((pass_name, text, terms, copy_bytes))


def always_finite(operator: Operator) -> Operator:
    """The operator without NaN and Inf among the inputs of its own cases."""
    return replace(operator, cases=tuple(c for c in operator.cases if c != "nonfinite"))


@pytest.fixture
def own_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only sets with the operator's own cases and scalars.

    The verifier's own sets have NaN, which spreads everywhere without the fallback, and scalars and
    factors above 1, with which numbers near fp32's largest number overflow.
    """
    certify = Schedule.certify

    def own(schedule: Schedule, seed: int, constants: Collection[str]) -> list[Case]:
        names = (NORMAL, *schedule.operator.cases)
        cases = certify(schedule, seed, constants)
        return [case for case in cases if case.name in names and not case.opposite]

    monkeypatch.setattr(Schedule, "certify", own)


# The first statement of the loop in each warpgroup's branch.
BEGINNINGS = {
    "splits rows": "            if (chunk < chunks_) {\n",
    "writes outputs": "            if (chunk >= 2 && chunk - 2 < chunks_) {\n",
    "adds to the state": "            store_state(state_before(chunk), state);\n",
    "computes outputs": "            Tile scores;\n",
}
AGAIN = "if (block_any_nonfinite<"


def headers(folder: Path, slow: str) -> Path:
    """Headers without the step-by-step fallback, and with one warpgroup slowed down."""
    include = folder / "include"
    shutil.copytree(include_dir(), include)
    header = include / "kgen" / "linear_attention" / "wgmma_loop.cuh"
    text, beginning = header.read_text(encoding="utf-8"), BEGINNINGS[slow]
    assert text.count(AGAIN) == text.count(beginning) == 1
    others_turn = "for (int turn = 0; turn < 400; ++turn) sync_warp();\n"
    text = text.replace(AGAIN, f"if (false && {AGAIN[4:]}")
    text = text.replace(beginning, others_turn + beginning)
    header.write_text(text, encoding="utf-8")
    return include


@pytest.mark.usefixtures("own_sets")
@pytest.mark.parametrize(
    ("pass_name", "slow"),  # each warpgroup once in the tiers
    one_of(2, [(("forward", "backward")[(place + turn) % 2], slow)
               for place, slow in enumerate(BEGINNINGS) for turn in (0, 1)]),
)
def test_the_others_wait_for_a_slow_warpgroup(pass_name: str, slow: str, tmp_path: Path) -> None:
    """A value that is read too early is NaN on the host; the fallback would hide it."""
    text = f"B=1,H=1,T=290,E=40,M=48,dtype=fp32,{BEFORE},{BEHIND}"
    check((pass_name, text, 3, 16), changed=always_finite, include=headers(tmp_path, slow))


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_stays_inside_its_buffers(pass_name: str) -> None:
    """Run under AddressSanitizer, with more chunks than buffers, the last chunk partial."""
    text = f"B=1,H=1,T=140,E=36,M=60,dtype=fp32,{BEFORE},{BEHIND}"
    check((pass_name, text, 3, 16), "host-asan", (BY_RANK,))


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_what_is_not_finite_over_chunks(pass_name: str) -> None:
    text = f"B=1,H=2,T=200,E=24,M=40,dtype=fp32,{BEFORE},{BEHIND}"
    check((pass_name, text, 3, 16), changed=always_nonfinite)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_a_scale_that_is_not_one(pass_name: str, finite: bool) -> None:
    """With a gradient of the final state, scale multiplies the rows that are summed.

    Otherwise it multiplies the outputs, in the kernel's loop and in the step-by-step fallback.
    """
    text = f"B=1,H=1,T=100,E=40,M=40,dtype=fp32,{BEFORE},{BEHIND}"

    def changed(operator: Operator) -> Operator:
        return with_other_scalars(operator if finite else always_nonfinite(operator))

    check((pass_name, text, 3, 16), orders=(BY_RANK,), changed=changed)


def one_too_large_for_bf16(name: str) -> Callable[[Operator], Operator]:
    """Change the operator: one number of an input is finite, but bf16 rounds it to Inf.

    All other numbers are smaller than usual, so that no result of this number overflows.
    """

    def change(operator: Operator) -> Operator:
        def inputs(
            pass_name: str, problem: Problem, _: str, drawn: torch.Generator, device: torch.device
        ) -> dict[str, torch.Tensor]:
            made = operator.make_inputs(pass_name, problem, "normal", drawn, device)
            made = {given: x * 2.0**-10 for given, x in made.items()}
            if made[name].numel():
                made[name][0, 0, made[name].shape[2] // 2, -1] = 3.4e38
            return made

        return replace(operator, make_inputs=inputs)

    return change


@pytest.mark.usefixtures("own_sets")
@pytest.mark.parametrize(
    ("pass_name", "name"),
    [("forward", "q"), ("forward", "k"), ("forward", "v"), ("forward", "initial_state"),
     ("backward", "gout"), ("backward", "q"), ("backward", "gfinal_state")],
)  # fmt: skip
def test_numbers_too_large_for_bf16(pass_name: str, name: str) -> None:
    """The bf16 terms of such a number are Inf and NaN; the outputs must be finite nevertheless."""
    assert torch.tensor(3.4e38).isfinite()
    assert torch.tensor(3.4e38).bfloat16().isinf()
    text = f"B=1,H=1,T=140,E=16,M=16,dtype=fp32,{BEFORE},{BEHIND}"
    check((pass_name, text, 3, 16), orders=(BY_RANK,), changed=one_too_large_for_bf16(name))


@pytest.mark.parametrize("terms", [2, 3])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_the_compiler_pipelines_wgmma(pass_name: str, terms: int) -> None:
    """If ptxas serialises wgmma, the kernel is right, but as slow as a kernel without wgmma."""
    products = TF32 if terms == 2 else "dtype=fp32"
    text = f"B=8,H=16,T=4096,E=64,M=64,{products}"
    variant, problem, config = case_of(pass_name, text, terms, 16)
    pass_ = ENTRY.operator.signature.pass_named(pass_name)
    assert is_feasible(variant, config, pass_, problem, H200)
    built = compiled(ENTRY, variant, config, problem)
    assert built.remarks == ()
    [(_, used)] = built.resources
    assert used.spill_bytes == 0, used
