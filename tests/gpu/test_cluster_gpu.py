"""Clusters of blocks on a GPU, and linear attention's blocks that meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.launch.cuda import CudaDevice, CudaModule
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan, make_plan
from kgen.model.problem import parse_problem
from kgen.render import Renderer
from kgen.runtime.cache import Cache
from kgen.search.feasible import is_feasible
from kgen.worker.binding import bind_sets, buffer_sets, shared_scratch

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
def module(tmp_path_factory: pytest.TempPathFactory) -> CudaModule:
    major, minor = torch.cuda.get_device_capability(0)
    compiler = open_compiler("nvrtc", [include_dir()], Cache(tmp_path_factory.mktemp("cache")))
    text = SOURCE.read_text(encoding="utf-8")
    rendered = Rendered("test/cluster", text, digest_of_text(text))
    [outcome] = compiler.build([BuildRequest(rendered, f"sm_{major}{minor}a")])
    assert isinstance(outcome, Artifact), outcome
    return CudaDevice(0).load(outcome)


def launch(module: CudaModule, name: str, blocks: int, **tensors: torch.Tensor) -> None:
    plan = Plan((Launch(name, (blocks, 1, 1), (THREADS, 1, 1), BYTES, tuple(tensors)),), ())
    module.bind(plan, tensors, {})()
    torch.cuda.synchronize()


@pytest.mark.parametrize("size", [2, 8])
def test_values_go_around_a_cluster(module: CudaModule, size: int) -> None:
    values = 1000 * size * THREADS
    out = torch.full((values,), torch.nan, device="cuda")
    launch(module, f"pass_on_{size}", 1000 * size, out=out)
    assert torch.equal(out, torch.arange(values, device="cuda") + 0.5 * size)


def test_barriers_in_halves(module: CudaModule) -> None:
    out = torch.full((4000, THREADS), torch.nan, device="cuda")
    launch(module, "pass_on_in_halves_4", 4000, out=out)
    blocks = torch.arange(4000 * THREADS, device="cuda").view(1000, 4, THREADS)
    assert torch.equal(out, 3.0 + blocks.roll(-1, 1).view(4000, THREADS))


def test_places(module: CudaModule) -> None:
    out = torch.full((8, 2), -1, dtype=torch.int32, device="cuda")
    launch(module, "places", 8, out=out)
    assert out.tolist() == [[rank % 4, 4] for rank in range(8)]


BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"


@pytest.mark.parametrize("products", ["mma", "wgmma"])
@pytest.mark.parametrize(
    "text",
    [
        "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
        f"B=1,H=3,T=5000,E=128,M=128,dtype=bf16,{BEFORE},{BEHIND}",
        f"B=1,H=8,T=4096,E=64,M=64,dtype=bf16,{BEHIND}",
    ],
)
def test_segment_walks_give_the_same_bits_always(text: str, products: str) -> None:
    """Calls back to back share the workspace: sums that are read too late or too early differ."""
    major, minor = torch.cuda.get_device_capability(0)
    if products == "wgmma" and (major, minor) != (9, 0):
        pytest.skip("wgmma is of sm_90a alone")
    entry, gpu = open_catalogue().entry("linear_attention"), profile_named("h200")
    signature = entry.operator.signature
    variant, problem = entry.space.variant("forward", "meeting"), parse_problem(text, signature)
    pass_ = signature.pass_named("forward")
    config = next(
        c
        for c in variant.first
        if c.as_dict()["products"] == products and is_feasible(variant, c, pass_, problem, gpu)
    )
    rendered = Renderer(include_dir()).render(
        entry.operator.name, entry.templates, variant, config, problem
    )
    compiler = open_compiler("nvrtc", [include_dir()])
    [built] = compiler.build([BuildRequest(rendered, f"sm_{major}{minor}a")])
    compiler.close()
    assert isinstance(built, Artifact), built
    plan, device = make_plan(variant, config, problem, gpu), CudaDevice(0)
    made = buffer_sets(entry.operator, gpu, "forward", problem, "warm", 1, device.torch_device)[0]
    scratch = shared_scratch(plan, problem, device.torch_device)
    calls = bind_sets(device.load(built), plan, entry.operator, "forward", problem, made, scratch)
    names = [t.name for t in pass_.outputs if t.name in made[0]]
    wanted: list[torch.Tensor] = []
    for _ in range(20):
        for tensor in [*scratch.values(), *(made[0][name] for name in names)]:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN, and of counters -1
        for _ in range(20):
            calls[0]()
        torch.cuda.synchronize()
        found = [made[0][name].clone() for name in names]
        assert all(bool(tensor.isfinite().all()) for tensor in found)
        wanted = wanted or found
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
