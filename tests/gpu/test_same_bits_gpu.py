"""linear_attention's split_t and wgmma_split_bf16 give the same bits in every call.

A value that is read too late or too early from a workspace or shared memory would differ from call
to call.
"""

from __future__ import annotations

import pytest
import torch

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.build.render import Renderer
from kgen.catalogue import open_catalogue, profile_named
from kgen.launch.cuda import CudaDevice
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.plan import make_plan
from kgen.model.problem import parse_problem
from kgen.search.feasible import is_feasible
from kgen.worker.binding import bind_sets, buffer_sets, shared_scratch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) < (9, 0),
        reason="programmatic dependent launch came with sm_90",
    ),
]

BEFORE, BEHIND = "initial_state_dtype=fp32", "final_state_dtype=fp32"
SPLIT_T = (
    "B=2,H=8,T=2048,E=128,M=128,dtype=bf16",
    f"B=1,H=3,T=5000,E=128,M=128,dtype=bf16,{BEFORE},{BEHIND}",
    f"B=1,H=8,T=4096,E=64,M=64,dtype=bf16,{BEHIND}",
)
TF32 = "dtype=fp32,product_dtype=tf32"
WGMMA_SPLIT_BF16 = (
    "B=8,H=16,T=4096,E=64,M=64,dtype=fp32",
    f"B=8,H=16,T=4096,E=64,M=64,{TF32}",
    f"B=4,H=16,T=1000,E=40,M=64,dtype=fp32,{BEFORE},{BEHIND}",
)
# Pass, variant, what multiplies where there is a choice, problem.
CASES = [
    *(("forward", "split_t", products, text) for products in ("mma", "wgmma") for text in SPLIT_T),
    *(
        (pass_name, "wgmma_split_bf16", None, text)
        for pass_name in ("forward", "backward")
        for text in WGMMA_SPLIT_BF16
    ),
]


@pytest.mark.parametrize(("pass_name", "name", "products", "text"), CASES)
def test_the_same_bits_always(
    pass_name: str, name: str, products: str | None, text: str
) -> None:
    """Calls back to back share the workspace."""
    major, minor = torch.cuda.get_device_capability(0)
    if products != "mma" and (major, minor) != (9, 0):
        pytest.skip("wgmma is of sm_90a alone")
    entry, gpu = open_catalogue().entry("linear_attention"), profile_named("h200")
    signature = entry.operator.signature
    variant, problem = entry.space.variant(pass_name, name), parse_problem(text, signature)
    pass_ = signature.pass_named(pass_name)
    config = next(
        c
        for c in variant.first
        if c.as_dict().get("products") == products
        and is_feasible(variant, c, pass_, problem, gpu)
    )
    rendered = Renderer(include_dir()).render(
        entry.operator.name, entry.templates, variant, config, problem
    )
    compiler = open_compiler("nvrtc", [include_dir()])
    [built] = compiler.build([BuildRequest(rendered, f"sm_{major}{minor}a")])
    compiler.close()
    assert isinstance(built, Artifact), built
    plan, device = make_plan(variant, config, problem, gpu), CudaDevice(0)
    made = buffer_sets(entry.operator, gpu, pass_name, problem, "warm", 1, device.torch_device)[0]
    scratch = shared_scratch(plan, problem, device.torch_device)
    calls = bind_sets(device.load(built), plan, entry.operator, pass_name, problem, made, scratch)
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
