"""Opening devices, resolving arguments, and plans on the host layer with torch's CPU tensors."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from kgen.build import open_compiler
from kgen.errors import GpuError, LaunchError
from kgen.launch import Module, detect_gpus, open_device
from kgen.launch import cuda as launch_cuda
from kgen.launch.base import launch_text
from kgen.launch.cuda import CudaDevice, LoadedCubin
from kgen.launch.host import HostDevice
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.gpu import GpuProfile
from kgen.model.plan import Launch, Plan
from kgen.runtime import cuda, device
from kgen.runtime.cache import Cache

INCLUDE = Path(__file__).parents[2] / "templates" / "include"
SOURCE = """\
#include <kgen/primitives/core.cuh>
#include <kgen/primitives/block.cuh>

// y[i] = a * x[i * stride], by way of shared memory, the block's elements reversed in it
extern "C" __global__ void gather(const float* x, float* scratch, long long stride, long long n,
                                  float a) {
    float* tile = kgen::dynamic_smem<float>();
    const long long i = (long long)blockDim.x * blockIdx.x + threadIdx.x;
    tile[blockDim.x - 1 - threadIdx.x] = i < n ? x[i * stride] : 0.0f;
    kgen::sync_block();
    if (i < n) scratch[i] = a * tile[blockDim.x - 1 - threadIdx.x];
}
KGEN_EXPORT(gather);

extern "C" __global__ void add_one(const float* scratch, float* y, long long n) {
    const long long i = (long long)blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = scratch[i] + 1.0f;
}
KGEN_EXPORT(add_one);
"""
HOST = GpuProfile(
    name="host", title="this CPU", device_names=(), arch="host", sm_count=2,
    smem_per_block=49152, smem_per_sm=49152, regs_per_sm=65536, max_threads_per_sm=1024,
    max_blocks_per_sm=1, l2_bytes=1 << 20, memory_bytes=1 << 30, bandwidth_gbps=10.0,
    fp32_tflops=0.1, tf32_tflops=0.0, half_tflops=0.0)
H200 = replace(HOST, name="h200", title="NVIDIA H200", device_names=("NVIDIA H200",), arch="sm_90a")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    compiler = open_compiler("host", [INCLUDE], Cache(tmp_path_factory.mktemp("cache")))
    rendered = Rendered("test/gather", SOURCE, digest_of_text(SOURCE))
    [outcome] = compiler.build([BuildRequest(rendered, "host")])
    assert isinstance(outcome, Artifact), outcome
    return outcome


@pytest.fixture
def module(artifact: Artifact) -> Module:
    return open_device(HOST).load(artifact)


def plan_for(n: int, threads: int = 64) -> Plan:
    grid, block = (-(-n // threads), 1, 1), (threads, 1, 1)
    return Plan(
        (Launch("gather", grid, block, 4 * threads, ("x", "scratch", "x_stride_N", "N", "a")),
         Launch("add_one", grid, block, 0, ("scratch", "y", "N"))),
        (),
    )


def tensors_for(n: int, stride: int = 3) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(n, stride)[:, 0], "y": torch.full((n,), torch.nan),
            "scratch": torch.full((n,), torch.nan)}


@pytest.mark.parametrize("seed", [0, 7])
def test_a_chain_of_kernels(artifact: Artifact, seed: int) -> None:
    device = HostDevice(seed=seed, threads=2)
    n = 1000
    tensors = tensors_for(n)
    run = device.load(artifact).bind(plan_for(n), tensors, {"N": n, "x_stride_N": 3, "a": 0.5})
    run()
    device.synchronize()
    assert torch.equal(tensors["y"], tensors["x"] * 0.5 + 1)
    tensors["x"].zero_()
    run()
    assert torch.equal(tensors["y"], torch.ones(n))


def test_launchers_get_the_attributes_of_their_launches(
    monkeypatch: pytest.MonkeyPatch, artifact: Artifact
) -> None:
    made: list[tuple[str, bool, bool]] = []

    class Driver:
        """Stands for a loaded module, and for a device."""

        ordinal, torch_device = 0, torch.device("cpu")

        def function(self, name: str) -> Function:
            return Function(name)

    class Function:
        def __init__(self, name: str) -> None:
            self.name = name

        def parameter_bytes(self) -> None:
            return None

        def allow_smem(self, smem_bytes: int) -> None: ...

        def demand_room(self, blocks: int, threads: int, smem_bytes: int) -> None: ...

    def make_launcher(function: Function, *args: object) -> None:
        made.append((function.name, bool(args[-2]), bool(args[-1])))

    monkeypatch.setattr(cuda, "CudaModule", lambda *_: Driver())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    monkeypatch.setattr(launch_cuda, "make_launcher", make_launcher)
    bound = LoadedCubin(artifact, cast("CudaDevice", Driver()))
    first, second = plan_for(10).launches
    numbers = {"N": 10, "x_stride_N": 3, "a": 1.0}
    wanted: list[tuple[str, bool, bool]] = []
    for pdl in ((False, False), (False, True), (True, False), (True, True)):
        launches = replace(first, pdl=pdl[0], coresident=pdl[1]), replace(second, pdl=pdl[1])
        bound.bind(Plan(launches, ()), tensors_for(10), numbers)
        for launch in launches:
            kind = launch.kernel, launch.pdl, launch.coresident
            if kind not in wanted:  # one launcher serves all that are alike
                wanted.append(kind)
        assert made == wanted
        assert ["programmatic dependent launch" in launch_text(x) for x in launches] == [*pdl]


def test_the_library_launches_kernels_that_wait_for_each_other_cooperatively(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(device, "make_launcher", lambda *args: made.append(args[-2:]))
    function = SimpleNamespace(allow_smem=lambda _: None, demand_room=lambda *_: None)
    file = object.__new__(device.KernelFile)
    file._cuda = cast("cuda.CudaModule", SimpleNamespace(function=lambda _: function))
    file.launcher("waits", "p", (64, 1, 1), 0, pdl=True, coresident=128)
    file.launcher("alone", "p", (64, 1, 1), 0)
    assert made == [(True, True), (False, False)]


def test_what_is_bound_stays_alive(module: Module) -> None:
    tensors = tensors_for(10)
    x, y = tensors["x"], tensors["y"]
    run = module.bind(plan_for(10), tensors, {"N": 10, "x_stride_N": 3, "a": 1.0})
    tensors.clear()
    run()
    assert torch.equal(y, x + 1)


def test_empty_launches_are_left_out(module: Module) -> None:
    tensors = tensors_for(0)
    module.bind(plan_for(0), tensors, {"N": 0, "x_stride_N": 3, "a": 1.0})()


@pytest.mark.parametrize(
    ("tensors", "numbers", "text"),
    [
        ({}, {}, r"gather: argument 'x_stride_N' has no value\n.*known: N, a, scratch, x, y"),
        ({}, {"x_stride_N": True}, "argument 'x_stride_N' is True; want an int or a float"),
        ({}, {"x_stride_N": 3, "x": 1}, "argument 'x' is given as a tensor and as a number"),
        ({"x": torch.empty(10, device="meta")}, {"x_stride_N": 3},
         "argument 'x' is on meta, but the kernel runs on cpu"),
    ],
)
def test_bad_arguments(
    module: Module, tensors: dict[str, torch.Tensor], numbers: dict[str, int], text: str
) -> None:
    with pytest.raises(LaunchError, match=text):
        module.bind(plan_for(10), {**tensors_for(10), **tensors}, {"N": 10, "a": 1.0, **numbers})


@pytest.mark.parametrize(
    ("args", "given"),
    [
        (("x", "scratch", "x_stride_N", "N"), "x: 8, scratch: 8, x_stride_N: 8, N: 8"),
        ((), ""),
        (("x", "scratch", "a", "N", "a"), "x: 8, scratch: 8, a: 4, N: 8, a: 4"),
    ],
)
def test_arguments_that_are_not_the_parameters(
    module: Module, args: tuple[str, ...], given: str
) -> None:
    launch = replace(plan_for(10).launches[0], args=args)
    numbers = {"N": 10, "x_stride_N": 3, "a": 1.0}
    with pytest.raises(LaunchError) as raised:
        module.bind(Plan((launch,), ()), tensors_for(10), numbers)
    assert str(raised.value).splitlines()[:3] == [
        "gather: the plan's arguments are not the kernel's parameters",
        f"  plan ({len(args)}, bytes each): {given}",
        "  kernel (5): 8, 8, 8, 8, 4",
    ]


def test_a_missing_kernel(module: Module) -> None:
    plan = Plan((Launch("nothing", (1, 1, 1), (1, 1, 1), 0, ()),), ())
    with pytest.raises(LaunchError, match="no kernel 'nothing'"):
        module.bind(plan, {}, {})
    with pytest.raises(LaunchError, match="no kernel 'nothing'"):
        module.occupancy("nothing", 32, 0)
    assert module.occupancy("gather", 64, 256) == 1


def test_a_refused_launch_names_kernel_grid_and_block(module: Module) -> None:
    plan = Plan((replace(plan_for(10).launches[0], smem_bytes=1 << 30),), ())
    run = module.bind(plan, tensors_for(10), {"N": 10, "x_stride_N": 3, "a": 1.0})
    with pytest.raises(LaunchError, match=r"(?s)gather: .*grid \(1, 1, 1\), block \(64, 1, 1\)"):
        run()


def test_wrong_or_damaged_files(artifact: Artifact, tmp_path: Path) -> None:
    device = open_device(HOST)
    with pytest.raises(LaunchError, match="of kind 'cubin'; the host loads 'so'"):
        device.load(replace(artifact, kind="cubin"))
    damaged = tmp_path / "x.so"
    damaged.write_bytes(b"not a module")
    with pytest.raises(LaunchError, match=r"x\.so does not load"):
        device.load(replace(artifact, path=str(damaged)))


def facts(name: str, capability: tuple[int, int], ordinal: int = 0) -> cuda.DeviceFacts:
    return cuda.DeviceFacts(ordinal, name, capability, 132, 232448, 1 << 37)


@pytest.mark.parametrize(
    ("seen", "ordinal", "text"),
    [
        ([], 0, r"(?s)'h200' was asked for on cuda:0, .*seen: \(none\)\n.*--gpu host"),
        ([facts("NVIDIA H200", (9, 0))], 1, r"asked for on cuda:1, .*\n  seen: cuda:0 NVIDIA H200"),
        ([facts("NVIDIA A100", (8, 0))], 0, r"is NVIDIA A100 \(compute capability 8\.0\), but"),
        ([facts("NVIDIA H100", (9, 0))], 0, "is NVIDIA H100 .*but profile 'h200' is NVIDIA H200"),
    ],
)
def test_the_wrong_gpu(
    seen: list[cuda.DeviceFacts], ordinal: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "devices", lambda: seen)
    with pytest.raises(GpuError, match=text):
        open_device(H200, ordinal)


def test_detect_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "devices", lambda: [facts("A", (8, 0)), facts("B", (9, 0), 1)])
    assert detect_gpus() == ["A", "B"]


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_driver", None)
    monkeypatch.setattr(cuda.Driver.__init__, "__defaults__", ("libno-such-driver.so.1",))
    assert detect_gpus() == []
    with pytest.raises(cuda.CudaError, match=r"(?s)driver is not usable: .*no-such.*next: install"):
        cuda.driver()
