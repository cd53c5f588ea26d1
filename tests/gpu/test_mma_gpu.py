"""Tensor-core products and matrix loads on a GPU, with the kernels that test the host layer."""

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
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) < (8, 0),
        reason="tensor cores with TF32 need a GPU of sm_80 or later",
    ),
]

SOURCE = Path(__file__).parents[1] / "unit" / "host_kernels" / "mma.cu"
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> LoadedCubin:
    major, minor = torch.cuda.get_device_capability(0)
    arch = f"sm_{major}{minor}" + ("a" if major >= 9 else "")
    compiler = open_compiler("nvrtc", [include_dir()], Cache(tmp_path_factory.mktemp("cache")))
    text = SOURCE.read_text(encoding="utf-8")
    rendered = Rendered("test/mma", text, digest_of_text(text))
    [outcome] = compiler.build([BuildRequest(rendered, arch)])
    assert isinstance(outcome, Artifact), outcome
    return CudaDevice(0).load(outcome)


def launch(module: LoadedCubin, name: str, grid: int, block: int, **tensors: torch.Tensor) -> None:
    plan = Plan((Launch(name, (grid, 1, 1), (block, 1, 1), 0, tuple(tensors)),), ())
    module.bind(plan, tensors, {})()
    torch.cuda.synchronize()


def integers(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator, device="cuda").float()


def test_tf32_product(module: LoadedCubin) -> None:
    a, b, c = integers(2, 16, 8, seed=1), integers(2, 8, 8, seed=2), integers(2, 16, 8, seed=3)
    out = torch.full((2, 2, 16, 8), torch.nan, device="cuda")
    launch(module, "mma_tf32", 1, 64, a=a, b=b, c=c, out=out)
    product = (a.double() @ b.double()).float()
    assert torch.equal(out, torch.stack([c + product, c + 2 * product], 1))


@pytest.mark.parametrize("loads", ["", "_ldmatrix"])
@pytest.mark.parametrize("dtype", list(HALVES))
def test_half_product(module: LoadedCubin, dtype: str, loads: str) -> None:
    a, b, c = integers(2, 16, 16, seed=4), integers(2, 16, 8, seed=5), integers(2, 16, 8, seed=6)
    out = torch.full((2, 2, 16, 8), torch.nan, device="cuda")
    kind = HALVES[dtype]
    launch(module, f"mma_{dtype}{loads}", 1, 64, a=a.to(kind), b=b.to(kind), c=c, out=out)
    product = (a.double() @ b.double()).float()
    assert torch.equal(out, torch.stack([c + product, c + 2 * product], 1))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [1, 2, 4])
def test_ldmatrix(module: LoadedCubin, matrices: int, transposed: bool) -> None:
    values = torch.arange(1, 257, dtype=torch.int16, device="cuda").reshape(4, 8, 8)
    out = torch.zeros(matrices, 32, dtype=torch.int32, device="cuda")
    name = f"ldmatrix_{matrices}{'_trans' if transposed else ''}"
    launch(module, name, 1, 32, values=values, out=out)
    ordered = values.transpose(1, 2) if transposed else values
    pairs = ordered[:matrices].reshape(matrices, 32, 2).int()
    assert torch.equal(out, pairs[..., 0] | pairs[..., 1] << 16)


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix(module: LoadedCubin, transposed: bool) -> None:
    values = torch.arange(1, 257, dtype=torch.int16, device="cuda").reshape(4, 8, 8)
    out = torch.zeros(4, 8, 8, dtype=torch.int16, device="cuda")
    name = "stmatrix_trans" if transposed else "stmatrix_plain"
    launch(module, name, 1, 32, words=values.view(torch.int32), out=out)
    assert torch.equal(out, values.transpose(1, 2) if transposed else values)


def test_splitting(module: LoadedCubin) -> None:
    generator = torch.Generator(device="cuda").manual_seed(3)
    exponents = torch.randint(-100, 100, (4096,), generator=generator, device="cuda")
    x = torch.randn(4096, generator=generator, device="cuda") * torch.pow(2.0, exponents)
    rounded, high, low = (torch.zeros(4096, dtype=torch.int32, device="cuda") for _ in range(3))
    launch(module, "split", 64, 64, x=x, rounded=rounded, high=high, low=low)
    assert torch.equal(rounded, high)  # cvt.rna and its emulation
    parts = [(p & ~0x1FFF).view(torch.float32).double() for p in (high, low)]
    error = (parts[0] + parts[1] - x.double()).abs()
    assert (error <= 2.0**-22 * x.double().abs()).all()


def test_sums_are_cut_off_towards_zero(module: LoadedCubin) -> None:
    """Which mma.cuh states, and the host layer does: 1 + 1.5 * 2^-24 would round up."""
    a, b = torch.zeros(2, 16, 8, device="cuda"), torch.zeros(2, 8, 8, device="cuda")
    a[:, :, 0], b[:, 0, :] = 1.5 * 2.0**-12, 2.0**-12
    c = torch.ones(2, 16, 8, device="cuda")
    c[1] = -1
    a[1] *= -1
    out = torch.full((2, 2, 16, 8), torch.nan, device="cuda")
    launch(module, "mma_tf32", 1, 64, a=a, b=b, c=c, out=out)
    assert torch.equal(out[:, 0], c)
