"""Products by warpgroups on a GPU, with the kernels that test the host layer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.launch.cuda import CudaDevice, CudaModule
from kgen.model.artifact import Artifact, BuildRequest, Rendered
from kgen.model.digest import digest_of_text
from kgen.model.plan import Launch, Plan
from kgen.runtime.cache import Cache

UNIT = Path(__file__).parents[1] / "unit"
sys.path.insert(0, str(UNIT))
from test_wgmma import BYTES, PRODUCTS, THREADS, operands  # noqa: E402 - beside this folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0),
        reason="wgmma is of sm_90a alone",
    ),
]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> CudaModule:
    compiler = open_compiler("nvrtc", [include_dir()], Cache(tmp_path_factory.mktemp("cache")))
    text = (UNIT / "host_kernels" / "wgmma.cu").read_text(encoding="utf-8")
    [outcome] = compiler.build(
        [BuildRequest(Rendered("test/wgmma", text, digest_of_text(text)), "sm_90a")]
    )
    compiler.close()
    assert isinstance(outcome, Artifact), outcome
    return CudaDevice(0).load(outcome)


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(module: CudaModule, name: str) -> None:
    a, b, c, wanted = operands(name)
    out = torch.full_like(wanted, torch.nan).cuda()
    tensors = {"a": a.cuda(), "b": b.cuda(), "c": c.cuda(), "out": out}
    plan = Plan((Launch(name, (1, 1, 1), (THREADS, 1, 1), BYTES, tuple(tensors)),), ())
    module.bind(plan, tensors, {})()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), wanted)
