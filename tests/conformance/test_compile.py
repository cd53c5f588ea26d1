"""Representative configs of every variant cross-compile for three generations of GPUs."""

from __future__ import annotations

import pytest

from kgen.assets import include_dir
from kgen.build import open_compiler
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import EmptySpaceError
from kgen.model.artifact import Artifact, BuildRequest
from kgen.model.problem import parse_problem
from kgen.render import Renderer
from kgen.search.feasible import enumerate_feasible
from kgen.tune.resources import MAX_SPILL_BYTES

GPUS = ("a100", "h200", "rtx_5090")
CONFIGS = 3
# Kernels that may spill as much as a tune admits: what is spilled lies in the path of the last
# steps, which one chunk of a sequence takes. Without it all others take longer (decision 0015).
MAY_SPILL = {("chunked", "wkv5_backward"), ("chunked", "wkv6_backward")}


@pytest.mark.parametrize("gpu_name", GPUS)
@pytest.mark.parametrize("operator", open_catalogue().names)
def test_cross_compiles_without_spills(operator: str, gpu_name: str) -> None:
    entry = open_catalogue().entry(operator)
    gpu = profile_named(gpu_name)
    renderer = Renderer(include_dir())
    requests, variants = [], []
    for variant in entry.space.variants:
        pass_ = entry.operator.signature.pass_named(variant.pass_name)
        compiled = 0
        for text in entry.operator.default_problems(variant.pass_name, on_host=False):
            problem = parse_problem(text, entry.operator.signature)
            try:
                configs = enumerate_feasible([variant], pass_, problem, gpu).configs
            except EmptySpaceError:
                continue
            config = configs[(compiled * len(configs)) // CONFIGS]
            rendered = renderer.render(operator, entry.templates, variant, config, problem)
            requests.append(BuildRequest(rendered, gpu.arch))
            variants.append(variant.name)
            compiled += 1
            if compiled == CONFIGS:
                break
        # A variant may need hardware that only newer GPUs have; none may be dead on an H200.
        assert compiled or gpu_name != "h200", f"{variant.name}: no default problem allows it"
    assert requests
    compiler = open_compiler("nvrtc", [include_dir()])
    builds = zip(requests, variants, compiler.build(requests), strict=True)
    for request, variant_name, built in builds:
        assert isinstance(built, Artifact), f"{request.rendered.name}: {built}"
        assert built.resources, "the compiler's resource report was not understood"
        for kernel, used in built.resources:
            most = MAX_SPILL_BYTES if (variant_name, kernel) in MAY_SPILL else 0
            assert used.spill_bytes <= most, f"{request.rendered.source[:400]}\n{kernel}: {used}"
            assert 0 < used.registers <= 255
    compiler.close()
