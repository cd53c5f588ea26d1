"""Products by warpgroups on a GPU, with the kernels that test the host layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from wgmma_cases import BYTES, INSIDE, PRODUCTS, THREADS, operands, operands_inside

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.launch.cuda import CudaDevice, LoadedCubin
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan
from kgen.runtime.cache import Cache

SOURCE = Path(__file__).parents[1] / "unit" / "host_kernels" / "wgmma.cu"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0),
        reason="wgmma is of sm_90a alone",
    ),
]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> LoadedCubin:
    compiler = open_compiler("nvrtc", [include_dir()], Cache(tmp_path_factory.mktemp("cache")))
    text = SOURCE.read_text(encoding="utf-8")
    [outcome] = compiler.build(
        [BuildRequest(Rendered("test/wgmma", text, digest_of_text(text)), "sm_90a")]
    )
    compiler.close()
    assert isinstance(outcome, Artifact), outcome
    return CudaDevice(0).load(outcome)


def launch(module: LoadedCubin, name: str, **tensors: torch.Tensor) -> None:
    plan = Plan((Launch(name, (1, 1, 1), (THREADS, 1, 1), BYTES, tuple(tensors)),), ())
    module.bind(plan, tensors, {})()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(module: LoadedCubin, name: str) -> None:
    a, b, c, wanted = operands(name)
    out = torch.full_like(wanted, torch.nan).cuda()
    launch(module, name, a=a.cuda(), b=b.cuda(), c=c.cuda(), out=out)
    assert torch.equal(out.cpu(), wanted)


def test_operands_that_begin_inside_a_panel(module: LoadedCubin) -> None:
    a, b, wanted = operands_inside()
    out = torch.full_like(wanted, torch.nan).cuda()
    launch(module, INSIDE, a=a.cuda(), b=b.cuda(), out=out)
    assert torch.equal(out.cpu(), wanted)
