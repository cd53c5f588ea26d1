"""Plans on a GPU: values, streams, graphs, threads, and every refusal."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kgen.build import open_compiler
from kgen.errors import LaunchError
from kgen.launch import detect_gpus
from kgen.launch.cuda import CudaDevice, LoadedCubin
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan
from kgen.runtime import cuda, launcher
from kgen.runtime.cache import Cache, read_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda is not available"),
]

SOURCE = """\
extern "C" __global__ void gather(const float* x, float* scratch, long long stride, long long n,
                                  float a) {
    extern __shared__ float tile[];
    const long long i = (long long)blockDim.x * blockIdx.x + threadIdx.x;
    tile[threadIdx.x] = i < n ? x[i * stride] : 0.0f;
    __syncthreads();
    if (i < n) scratch[i] = a * tile[threadIdx.x];
}
extern "C" __global__ void add_one(const float* scratch, float* y, long long n) {
    const long long i = (long long)blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = scratch[i] + 1.0f;
}
extern "C" __global__ void swap(float* y, int n) {
    __shared__ float tile[256];
    tile[threadIdx.x] = n;
    __syncthreads();
    y[threadIdx.x] = tile[threadIdx.x ^ 1];
}
"""
NUMBERS = {"N": 1000, "x_stride_N": 3, "a": 0.5}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    major, minor = torch.cuda.get_device_capability(0)
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    compiler = open_compiler("nvrtc", [], Cache(tmp_path_factory.mktemp("cache")))
    rendered = Rendered("test/gather", SOURCE, digest_of_text(SOURCE))
    [outcome] = compiler.build([BuildRequest(rendered, arch)])
    assert isinstance(outcome, Artifact), outcome
    return outcome


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(0)


@pytest.fixture(scope="module")
def module(device: CudaDevice, artifact: Artifact) -> LoadedCubin:
    return device.load(artifact)


@pytest.fixture(params=["as built", "python"])
def which_launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(launcher, "compiled_launcher", lambda: None)


def plan_for(n: int, smem_bytes: int = 1024) -> Plan:
    grid, block = (-(-n // 256), 1, 1), (256, 1, 1)
    return Plan(
        (Launch("gather", grid, block, smem_bytes, ("x", "scratch", "x_stride_N", "N", "a")),
         Launch("add_one", grid, block, 0, ("scratch", "y", "N"))),
        (),
    )


def tensors_for(n: int = 1000) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(n, 3, device="cuda")[:, 0],
            "y": torch.full((n,), torch.nan, device="cuda"),
            "scratch": torch.full((n,), torch.nan, device="cuda")}


@pytest.mark.usefixtures("which_launcher")
def test_a_chain_of_kernels(device: CudaDevice, module: LoadedCubin) -> None:
    tensors = tensors_for()
    run = module.bind(plan_for(1000), tensors, NUMBERS)
    run()
    device.synchronize()
    assert torch.equal(tensors["y"], tensors["x"] * 0.5 + 1)


@pytest.mark.usefixtures("which_launcher")
def test_torchs_current_stream_is_looked_up_at_the_call(module: LoadedCubin) -> None:
    tensors = tensors_for()
    run = module.bind(plan_for(1000), tensors, NUMBERS)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        tensors["x"].fill_(4.0)
        run()
        after = tensors["y"].clone()
    stream.synchronize()
    assert torch.equal(after, torch.full_like(after, 3.0))


@pytest.mark.usefixtures("which_launcher")
def test_a_graph_replays_the_plan(module: LoadedCubin) -> None:
    tensors = tensors_for()
    run = module.bind(plan_for(1000), tensors, NUMBERS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    assert tensors["y"].isnan().all()
    for value in (1.0, 6.0):
        tensors["x"].fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(tensors["y"], torch.full_like(tensors["y"], value * 0.5 + 1))


def test_a_module_may_be_loaded_and_bound_during_a_capture(
    device: CudaDevice, artifact: Artifact
) -> None:
    tensors = tensors_for()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        device.load(artifact).bind(plan_for(1000), tensors, NUMBERS)()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(tensors["y"], tensors["x"] * 0.5 + 1)


@pytest.mark.usefixtures("which_launcher")
def test_a_new_thread(module: LoadedCubin) -> None:
    tensors = tensors_for()
    run = module.bind(plan_for(1000), tensors, NUMBERS)
    torch.cuda.synchronize()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            run()
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert errors == []
    assert torch.equal(tensors["y"], tensors["x"] * 0.5 + 1)


@pytest.mark.usefixtures("which_launcher")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_other_gpus_context_is_current(artifact: Artifact) -> None:
    second = CudaDevice(1)
    tensors = {name: tensor.to("cuda:1") for name, tensor in tensors_for().items()}
    tensors["x"] = torch.randn(1000, 3, device="cuda:1")[:, 0]
    run = second.load(artifact).bind(plan_for(1000), tensors, NUMBERS)
    with torch.cuda.device(0):
        torch.empty(1, device="cuda:0")
        torch.cuda.synchronize(1)
        run()
        assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(1)
    assert torch.equal(tensors["y"], tensors["x"] * 0.5 + 1)


def test_more_than_48_kb_of_shared_memory(module: LoadedCubin, device: CudaDevice) -> None:
    tensors = tensors_for()
    large = module.bind(plan_for(1000, 96 * 1024), tensors, NUMBERS)
    module.bind(plan_for(1000, 64 * 1024), tensors, NUMBERS)  # must not lower the limit
    large()
    device.synchronize()
    assert torch.equal(tensors["y"], tensors["x"] * 0.5 + 1)
    with pytest.raises(LaunchError, match=r"gather: 1048576 bytes of dynamic shared memory"):
        module.bind(plan_for(1000, 1 << 20), tensors, NUMBERS)


def test_occupancy_and_resources(module: LoadedCubin) -> None:
    assert module.occupancy("gather", 256, 0) >= module.occupancy("gather", 1024, 32 * 1024) >= 1
    resources = dict(module.resources)
    assert resources["swap"].smem_bytes >= 1024
    loaded = cuda.CudaModule(read_file(module.artifact.path), 0)
    assert loaded.function("gather").registers() == resources["gather"].registers
    assert loaded.function("gather").parameter_bytes() in (None, (8, 8, 8, 8, 4))
    loaded.unload()


def test_arguments_that_are_not_the_kernels(module: LoadedCubin) -> None:
    tensors = tensors_for()
    plan = Plan((Launch("add_one", (1, 1, 1), (32, 1, 1), 0, ("scratch", "y")),), ())
    if cuda.driver().version >= (12, 4):
        with pytest.raises(LaunchError, match=r"(?s)add_one: the plan's .*kernel \(3\): 8, 8, 8"):
            module.bind(plan, tensors, {})
        wrong = Plan((replace(plan.launches[0], kernel="swap", args=("y", "N")),), ())
        with pytest.raises(LaunchError, match=r"N: 8\n  kernel \(2\): 8, 4"):
            module.bind(wrong, tensors, NUMBERS)


@pytest.mark.usefixtures("which_launcher")
def test_a_refused_launch_names_kernel_grid_and_block(module: LoadedCubin) -> None:
    plan = Plan((Launch("add_one", (1, 65536, 1), (32, 1, 1), 0, ("scratch", "y", "N")),), ())
    run = module.bind(plan, tensors_for(), NUMBERS)
    with pytest.raises(LaunchError, match=r"(?s)add_one: cuLaunchKernel: CUDA_ERROR_INVALID_VALUE "
                                          r".*grid \(1, 65536, 1\), block \(32, 1, 1\)"):
        run()
    torch.cuda.synchronize()


def test_what_does_not_load(device: CudaDevice, artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="of kind 'so'; a GPU loads 'cubin'"):
        device.load(replace(artifact, kind="so"))
    damaged = tmp_path / "damaged.cubin"
    damaged.write_bytes(b"this is no cubin")
    with pytest.raises(LaunchError, match=r"damaged\.cubin on cuda:0: cuModuleLoadData: CUDA_ERR"):
        device.load(replace(artifact, path=str(damaged)))
    with pytest.raises(LaunchError, match="kernel 'nothing': cuModuleGetFunction"):
        device.load(artifact).occupancy("nothing", 32, 0)


def test_closing_a_module(device: CudaDevice, artifact: Artifact) -> None:
    module = device.load(artifact)
    module.bind(plan_for(1000), tensors_for(), NUMBERS)()
    device.synchronize()
    module.close()
    module.close()


def test_the_driver_and_torch_see_the_same_gpus() -> None:
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert detect_gpus() == names
    facts = cuda.devices()[0]
    properties = torch.cuda.get_device_properties(0)
    assert facts.sm_count == properties.multi_processor_count
    assert facts.compute_capability == (properties.major, properties.minor)


def test_the_plain_launch(module: LoadedCubin) -> None:
    loaded = cuda.CudaModule(read_file(module.artifact.path), 0)
    y = torch.full((256,), torch.nan, device="cuda")
    torch.cuda.synchronize()
    pointer, n = ctypes.c_void_p(y.data_ptr()), ctypes.c_int(9)
    params = (ctypes.c_void_p * 2)(ctypes.addressof(pointer), ctypes.addressof(n))
    cuda.launch(loaded.function("swap"), (1, 1, 1), (256, 1, 1), 0, 0, params)
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 9.0))
    loaded.unload()
