"""Clusters of blocks: exact on the host, every planted fault named, and they cross-compile."""

from __future__ import annotations

from ctypes import c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx
from torch import Tensor

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.launch.host_jobs import BufferRef, JobLaunch, run_job, write_job
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of
from kgen.runtime.host import HostFault, HostModule, HostRefusal

THREADS = 64
BYTES = 16384  # of dynamic shared memory: more than any kernel here needs
RUN_TIMEOUT_S = 60.0

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("cluster")


def launch(
    module: HostModule, kernel: str, blocks: int, *tensors: Tensor, seed: int = 0, threads: int = 0
) -> None:
    """Run a kernel in blocks of THREADS."""
    args = [c_void_p(tensor.data_ptr()) for tensor in tensors]
    module.function(kernel).launch((blocks,), (THREADS,), BYTES, args, seed=seed, threads=threads)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 8])
def test_values_go_around_a_cluster(module: HostModule, size: int, seed: int) -> None:
    blocks = 3 * size
    out = torch.full((blocks * THREADS,), torch.nan)
    launch(module, f"pass_on_{size}", blocks, out, seed=seed)
    assert torch.equal(out, torch.arange(blocks * THREADS) + 0.5 * size)


@pytest.mark.parametrize("threads", [1, 2])
def test_barriers_in_halves(module: HostModule, threads: int) -> None:
    out = torch.full((12, THREADS), torch.nan)
    launch(module, "pass_on_in_halves_4", 12, out, seed=1, threads=threads)
    blocks = torch.arange(12 * THREADS).view(3, 4, THREADS)
    assert torch.equal(out, 3.0 + blocks.roll(-1, 1).view(12, THREADS))


def test_places(module: HostModule) -> None:
    out = torch.full((8, 2), -1, dtype=torch.int32)
    launch(module, "places", 8, out)
    assert out.tolist() == [[rank % 4, 4] for rank in range(8)]


def test_static_shared_memory_is_a_blocks_own(module: HostModule) -> None:
    out = torch.full((8, THREADS), torch.nan)
    launch(module, "keep_static", 8, out, seed=3)
    assert torch.equal(out, (torch.arange(8) % 4).float()[:, None].expand(8, THREADS))


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("one_block_leaves", "a block of its cluster has returned"),
        ("one_warp_leaves", "divergent cluster barrier: 32 of 64 threads"),
        ("too_early", "before a cluster barrier"),
        ("no_such_block", "block 2 of a cluster that has 2"),
    ],
)
def test_faults_are_named(module: HostModule, kernel: str, message: str) -> None:
    with pytest.raises(HostFault, match=message):
        launch(module, kernel, 2, torch.zeros(2 * THREADS))
    out = torch.full((16 * THREADS,), torch.nan)  # and the workers are fit for the next launch
    launch(module, "pass_on_8", 16, out)
    assert torch.equal(out, torch.arange(16 * THREADS) + 4.0)


@pytest.mark.parametrize("kernel", ["too_late", "no_barrier_between"])
def test_a_missing_barrier_gives_nan(module: HostModule, kernel: str) -> None:
    out = torch.zeros(2 * THREADS)
    launch(module, kernel, 2, out)
    assert out.isnan().any()


def test_a_grid_is_whole_clusters(module: HostModule) -> None:
    with pytest.raises(HostRefusal, match="multiple of the cluster's 8 blocks"):
        launch(module, "pass_on_8", 12, torch.zeros(12 * THREADS))


def test_clusters_under_address_sanitizer() -> None:
    builds = host_builds()
    out = 16 * THREADS * 4
    job = write_job(
        builds.directory / "cluster-job",
        [out],
        [JobLaunch("pass_on_8", (16,), (THREADS,), 4 * THREADS, [BufferRef(0)], seed=1)],
    )
    (content,) = run_job(builds.executable("cluster"), job, RUN_TIMEOUT_S)
    found = torch.frombuffer(bytearray(content), dtype=torch.float32)
    assert torch.equal(found, torch.arange(16 * THREADS) + 4.0)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_cross_compilation(arch: str) -> None:
    source = (KERNELS / "cluster.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    [built] = compiler.build([BuildRequest(Rendered("cluster", source, digest_of(source)), arch)])
    compiler.close()
    assert isinstance(built, Artifact), built
    assert {"pass_on_8", "pass_on_in_halves_4"} <= {kernel for kernel, _ in built.resources}
