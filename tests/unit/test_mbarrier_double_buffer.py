"""Double buffer of mbarriers: all rows arrive in any order of threads; a missing step shows."""

from __future__ import annotations

from ctypes import c_int, c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of
from kgen.runtime.host import HostFault

COLUMNS = 64
SEEDS = range(4)

pytestmark = needs_cxx


def run(fault: str, items: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What came out, and what should have."""
    values = torch.arange(float(items * COLUMNS)).view(items, COLUMNS)
    out = torch.full_like(values, torch.nan)
    args = [c_void_p(values.data_ptr()), c_void_p(out.data_ptr()), c_int(items)]
    kernel = host_builds().module("mbarrier_double_buffer").function(f"pass_rows_{fault}")
    kernel.launch((1,), (2 * COLUMNS,), 0, args, seed=seed)
    return out, 2 * values


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("items", [0, 1, 2, 3, 4, 5, 11])
def test_rows_arrive(items: int, seed: int) -> None:
    out, wanted = run("none", items, seed)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("fault", ["no_release", "one_releases"])
def test_a_slot_that_is_never_released_is_reported(fault: str) -> None:
    out, wanted = run(fault, 2, 0)  # no producer waits for it
    assert torch.equal(out, wanted)
    arrived = 0 if fault == "no_release" else 1
    with pytest.raises(HostFault, match=f"wait for phase 0 of mbarrier .*: {arrived} of 2 arriv"):
        run(fault, 3, 0)


@pytest.mark.parametrize("fault", ["no_acquire", "no_wait", "early_release"])
def test_a_step_left_out_shows(fault: str) -> None:
    def shows(seed: int) -> bool:
        try:
            out, wanted = run(fault, 11, seed)
        except HostFault:
            return True
        return not torch.equal(out, wanted)

    assert any(shows(seed) for seed in SEEDS)


def test_cross_compilation() -> None:
    source = (KERNELS / "mbarrier_double_buffer.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("mbarrier_double_buffer", source, digest_of(source))
    [built] = compiler.build([BuildRequest(rendered, "sm_90a")])
    compiler.close()
    assert isinstance(built, Artifact), built
    assert all(use.spill_bytes == 0 for _, use in built.resources)
