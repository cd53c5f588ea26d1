"""Products by warpgroups on the host layer, in every order of operands; and they cross-compile."""

from __future__ import annotations

import itertools
from ctypes import c_int, c_void_p

import pytest
import torch
from host_builds import KERNELS, host_builds, needs_cxx
from wgmma_cases import BYTES, INSIDE, PRODUCTS, THREADS, integers, operands, operands_inside

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of
from kgen.runtime.host import HostFault, HostModule

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def module() -> HostModule:
    return host_builds().module("wgmma")


def launch(module: HostModule, name: str, *tensors: torch.Tensor, seed: int = 0) -> None:
    args = [c_void_p(tensor.data_ptr()) for tensor in tensors]
    module.function(name).launch((1,), (THREADS,), BYTES, args, seed=seed)


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(module: HostModule, name: str) -> None:
    a, b, c, wanted = operands(name)
    for seed in (0, 1):
        out = torch.full_like(wanted, torch.nan)
        launch(module, name, a, b, c, out, seed=seed)
        assert torch.equal(out, wanted)


def test_operands_that_begin_inside_a_panel(module: HostModule) -> None:
    a, b, wanted = operands_inside()
    for seed in (0, 1):
        out = torch.full_like(wanted, torch.nan)
        launch(module, INSIDE, a, b, out, seed=seed)
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


def test_a_product_needs_fences(module: HostModule) -> None:
    """Of registers, before each product after a wait; of rows, if other instructions wrote them."""
    a = integers(64, 16, seed=4).bfloat16()
    with pytest.raises(HostFault, match="without a wgmma_fence since the last wgmma_wait"):
        launch(module, "fences_once", a)
    places = [c_void_p(a.data_ptr()), c_void_p()]
    for fences, seed in itertools.product((0, 1), range(4)):
        out = torch.full((THREADS,), torch.nan)
        places[1] = c_void_p(out.data_ptr())
        arguments = [*places, c_int(fences)]
        module.function("shows").launch((1,), (THREADS,), BYTES, arguments, seed=seed)
        rank = torch.arange(THREADS)
        wanted = (a.float() @ a.float().T)[rank // 32 % 4 * 16 + rank % 32 // 4, rank % 4 * 2]
        assert torch.equal(out, wanted) == (fences == 1 or seed % 2 == 0)


def test_products_of_two_shapes_need_a_fence_between_them(module: HostModule) -> None:
    a = integers(64, 16, seed=4).bfloat16()
    place = c_void_p(a.data_ptr())
    module.function("two_shapes").launch((1,), (THREADS,), BYTES, [place, c_int(1)])
    with pytest.raises(HostFault, match="a product of another shape without a wgmma_fence"):
        module.function("two_shapes").launch((1,), (THREADS,), BYTES, [place, c_int(0)])


def test_an_operand_moves_inside_its_panel(module: HostModule) -> None:
    """Where a GPU's descriptor would lead into the next row instead of the next panel."""
    a = integers(64, 192, seed=4).bfloat16()
    place = c_void_p(a.data_ptr())
    for column in (0, 8, 64):
        module.function("moves").launch((1,), (32,), BYTES, [place, c_int(column)])
    for column in (16, 32, 96):
        with pytest.raises(HostFault, match="not in a panel of 64"):
            module.function("moves").launch((1,), (32,), BYTES, [place, c_int(column)])


def test_cross_compilation() -> None:
    source = (KERNELS / "wgmma.cu").read_text(encoding="utf-8")
    compiler = open_compiler("nvrtc", [include_dir()])
    rendered = Rendered("wgmma", source, digest_of(source))
    old, new = compiler.build([BuildRequest(rendered, arch) for arch in ("sm_80", "sm_90a")])
    compiler.close()
    assert isinstance(old, Artifact), old
    assert isinstance(new, Artifact), new
    assert not old.resources
    found = dict(new.resources)
    assert set(found) == {*PRODUCTS, INSIDE}
    assert all(use.spill_bytes == 0 for use in found.values()), found
