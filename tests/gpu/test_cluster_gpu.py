"""Clusters of blocks on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.launch.cuda import CudaDevice, LoadedCubin
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan
from kgen.runtime.cache import Cache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) < (9, 0),
        reason="clusters of blocks need a GPU of sm_90 or later",
    ),
]

SOURCE = Path(__file__).parents[1] / "unit" / "host_kernels" / "cluster.cu"
THREADS = 64
BYTES = 16384  # of dynamic shared memory: more than any kernel here needs


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> LoadedCubin:
    major, minor = torch.cuda.get_device_capability(0)
    compiler = open_compiler("nvrtc", [include_dir()], Cache(tmp_path_factory.mktemp("cache")))
    text = SOURCE.read_text(encoding="utf-8")
    rendered = Rendered("test/cluster", text, digest_of_text(text))
    [outcome] = compiler.build([BuildRequest(rendered, f"sm_{major}{minor}a")])
    assert isinstance(outcome, Artifact), outcome
    return CudaDevice(0).load(outcome)


def launch(module: LoadedCubin, name: str, blocks: int, **tensors: torch.Tensor) -> None:
    plan = Plan((Launch(name, (blocks, 1, 1), (THREADS, 1, 1), BYTES, tuple(tensors)),), ())
    module.bind(plan, tensors, {})()
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [2, 8])
def test_values_go_around_a_cluster(module: LoadedCubin, size: int) -> None:
    values = 1000 * size * THREADS
    out = torch.full((values,), torch.nan, device="cuda")
    launch(module, f"pass_on_{size}", 1000 * size, out=out)
    assert torch.equal(out, torch.arange(values, device="cuda") + 0.5 * size)


def test_barriers_in_halves(module: LoadedCubin) -> None:
    out = torch.full((4000, THREADS), torch.nan, device="cuda")
    launch(module, "pass_on_in_halves_4", 4000, out=out)
    blocks = torch.arange(4000 * THREADS, device="cuda").view(1000, 4, THREADS)
    assert torch.equal(out, 3.0 + blocks.roll(-1, 1).view(4000, THREADS))


def test_places(module: LoadedCubin) -> None:
    out = torch.full((8, 2), -1, dtype=torch.int32, device="cuda")
    launch(module, "places", 8, out=out)
    assert out.tolist() == [[rank % 4, 4] for rank in range(8)]
