"""Products by warpgroups on the host layer, in every order of their operands; and they cross-compile."""

from __future__ import annotations

from ctypes import c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of
from kgen.runtime.host import HostFault, HostModule

THREADS = 256
BYTES = 96 * 1024  # of dynamic shared memory: more than any kernel here needs
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
PRODUCTS = (
    "bf16_32_columns_columns", "bf16_32_columns_rows", "bf16_32_rows_rows",
    "bf16_64_columns_columns", "bf16_64_columns_rows", "bf16_64_rows_columns", "bf16_64_rows_rows",
    "bf16_128_columns_columns", "bf16_128_columns_rows", "bf16_128_rows_rows",
    "fp16_64_columns_rows", "fp16_128_rows_rows",
)  # fmt: skip

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("wgmma")


def launch(module: HostModule, name: str, *tensors: torch.Tensor, seed: int = 0) -> None:
    args = [c_void_p(tensor.data_ptr()) for tensor in tensors]
    module.function(name).launch((1,), (THREADS,), BYTES, args, seed=seed)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small enough that every product and sum is exact in every type."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float()


def operands(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A and B as the kernel wants them, C, and what must come out."""
    dtype, n, along_a, along_b = name.split("_")
    a, b = integers(64, 128, seed=1), integers(128, 2 * int(n), seed=2)
    c = integers(64, 2 * int(n), seed=3)
    kind = HALVES[dtype]
    return (
        (a if along_a == "columns" else a.T).contiguous().to(kind),
        (b if along_b == "rows" else b.T).contiguous().to(kind),
        c,
        c + 2 * (a @ b),
    )


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(module: HostModule, name: str) -> None:
    a, b, c, wanted = operands(name)
    for seed in (0, 1):
        out = torch.full_like(wanted, torch.nan)
        launch(module, name, a, b, c, out, seed=seed)
        assert torch.equal(out, wanted)


def test_a_product_is_there_when_it_is_waited_for(module: HostModule) -> None:
    a, b = integers(64, 16, seed=4).bfloat16(), integers(32, 16, seed=5).bfloat16()
    out = torch.full((3, THREADS), torch.nan)
    launch(module, "waits", a, b, out)
    rank = torch.arange(THREADS)
    product = (a.float() @ b.float().T)[rank // 32 % 4 * 16 + rank % 32 // 4, rank % 4 * 2]
    assert torch.equal(out, torch.stack([0 * product, product, 2 * product]))
    with pytest.raises(HostFault, match="before it had waited for 1 of its products"):
        launch(module, "never_waits", a)


def test_cross_compilation() -> None:
    source = (KERNELS / "wgmma.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("wgmma", source, digest_of(source))
    old, new = compiler.build([BuildRequest(rendered, arch) for arch in ("sm_80", "sm_90a")])
    compiler.close()
    assert isinstance(old, Artifact) and isinstance(new, Artifact), (old, new)
    assert {kernel for kernel, _ in old.resources} == set()
    found = {kernel: use for kernel, use in new.resources}
    assert set(PRODUCTS) == set(found)
    assert all(use.spill_bytes == 0 for use in found.values()), found
