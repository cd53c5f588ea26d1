"""Grid barriers by counters: exact on the host in any order of blocks, and they cross-compile."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of
from kgen.runtime.host import HostFault

THREADS = 64
BYTES = 16384  # of dynamic shared memory: more than any kernel here needs
LINE = 32  # elements between two counters
GROUPS = 3

pytestmark = needs_cxx


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("size", [4, 16])
def test_values_go_around_a_group(size: int, seed: int) -> None:
    module = host_builds().module("grid_barrier")
    counters = torch.full((GROUPS * LINE,), -123456, dtype=torch.int32)
    values, out = (torch.full((GROUPS * size * THREADS,), torch.nan) for _ in range(2))
    places = [c_void_p(tensor.data_ptr()) for tensor in (values, counters, out)]
    for _ in range(2):  # what a launch leaves in the counters the next one does not mind
        module.function("clear").launch((1,), (THREADS,), 0, [places[1], c_int64(GROUPS)])
        kernel = module.function(f"pass_on_{size}")
        kernel.launch((GROUPS * size,), (THREADS,), BYTES, places, seed=seed, threads=2)
        assert torch.equal(out, torch.arange(GROUPS * size * THREADS) + 0.5 * size)
        out.fill_(torch.nan)
    between = torch.arange(GROUPS * LINE) % LINE != 0
    assert (counters[between] == -123456).all()  # a counter is a line's first element alone


def test_a_number_that_is_announced_before_it_is_written() -> None:
    """A turn ends at an arrival in every second order, also where the block could go on."""
    module = host_builds().module("grid_barrier")
    wrong = []
    for seed in range(4):
        counters = torch.zeros(GROUPS * LINE, dtype=torch.int32)
        values, out = (torch.full((GROUPS * 4 * THREADS,), torch.nan) for _ in range(2))
        places = [c_void_p(tensor.data_ptr()) for tensor in (values, counters, out)]
        kernel = module.function("announces_early")
        kernel.launch((GROUPS * 4,), (THREADS,), BYTES, places, seed=seed)
        wrong.append(bool(out.isnan().any()))
    assert wrong == [False, True, False, True]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_block_that_does_not_arrive_is_reported(seed: int) -> None:
    module = host_builds().module("grid_barrier")
    counters = torch.zeros(LINE, dtype=torch.int32)
    places = [c_void_p(), c_void_p(counters.data_ptr()), c_void_p()]
    with pytest.raises(HostFault, match="waits for a counter of 4, which is 3"):
        module.function("waits_for_more").launch((4,), (THREADS,), BYTES, places, seed=seed)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_cross_compilation(arch: str) -> None:
    source = (KERNELS / "grid_barrier.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("grid_barrier", source, digest_of(source))
    [built] = compiler.build([BuildRequest(rendered, arch)])
    compiler.close()
    assert isinstance(built, Artifact), built
    assert {"clear", "pass_on_4", "pass_on_16"} <= {kernel for kernel, _ in built.resources}
