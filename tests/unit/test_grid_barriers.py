"""Kernels whose blocks wait for each other: known from the template, refused without room."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kgen.catalogue import open_catalogue, profile_named
from kgen.catalogue.kernels import kernels_of
from kgen.model.plan import make_plan
from kgen.model.problem import parse_problem
from kgen.runtime.cuda import COOPERATIVE_LAUNCH_TOO_LARGE, CudaError, Function
from kgen.search.feasible import enumerate_feasible

TEMPLATE = """
extern "C" __global__ void waits(float* x) {}
extern "C" __global__ void clears(float* x) {}
extern "C" __global__ void alone(float* x) {}
KGEN_EXPORT_CTA_GROUPS(waits, 8);
KGEN_EXPORT(clears);  // not KGEN_EXPORT_CTA_GROUPS(clears, 8)
KGEN_EXPORT(alone);
"""


def test_the_export_says_which_kernels_wait(tmp_path: Path) -> None:
    path = tmp_path / "t.cu.jinja"
    path.write_text(TEMPLATE)
    found = kernels_of(path, {})
    assert {name: kernel.has_grid_barriers for name, kernel in found.items()} == {
        "waits": True, "clears": False, "alone": False}


def test_a_plan_says_which_grid_needs_room() -> None:
    entry, h200 = open_catalogue().entry("linear_attention"), profile_named("h200")
    problem = parse_problem("B=2,H=8,T=2048,E=128,M=128,dtype=bf16", entry.operator.signature)
    variants = {v.name: v for v in entry.space.of_pass("forward")}
    feasible = enumerate_feasible(
        list(variants.values()), entry.operator.signature.pass_named("forward"), problem, h200)
    found = {
        (config.variant, launch.kernel): launch.coresident
        for config in feasible.configs
        for launch in make_plan(variants[config.variant], config, problem, h200).launches
    }
    waiting = {key for key, coresident in found.items() if coresident}
    assert waiting == {("split_t", "linear_attention_forward")}
    assert ("split_t", "linear_attention_clear") in found


class OneKernel(Function):
    """A kernel of which three blocks fit an SM, on a device with some SMs."""

    def __init__(self, sm_count: int) -> None:
        device = SimpleNamespace(sm_count=sm_count)
        driver: Any = SimpleNamespace(device=lambda ordinal: device)
        module: Any = SimpleNamespace(driver=driver, context=None, ordinal=0)
        super().__init__(1, "waits", module)

    def blocks_per_sm(self, threads: int, smem_bytes: int) -> int:
        assert (threads, smem_bytes) == (128, 1024)
        return 3


def test_the_last_block_that_has_room() -> None:
    OneKernel(sm_count=4).demand_room(12, 128, 1024)
    with pytest.raises(CudaError, match=r"waits: 13 blocks wait .* the 4 SMs .* room for 12"
                       ) as refused:
        OneKernel(sm_count=4).demand_room(13, 128, 1024)
    assert refused.value.code == COOPERATIVE_LAUNCH_TOO_LARGE


def test_sms_that_are_taken_away_count() -> None:
    OneKernel(sm_count=132).demand_room(128, 128, 1024)
    with pytest.raises(CudaError, match="the 16 SMs of this device have room for 48"):
        OneKernel(sm_count=16).demand_room(128, 128, 1024)
